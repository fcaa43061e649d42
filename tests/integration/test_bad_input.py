"""What cannot start ends a node with one sentence and exit code 78, through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support import warm_start
from support.generic_models import config_of
from support.lora_files import write_adapter
from support.oracle import make_tiny, write_model
from support.redis_server import RedisServer

pytestmark = pytest.mark.thorough


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def with_adapter(make: Callable[[Path, Path], object]) -> Callable[[Path], list[str]]:
    """`make` writes the adapter of a model into a folder."""

    def spoil(model: Path) -> list[str]:
        make(model.parent / "adapter", model)
        return ["--lora", f"ad={model.parent / 'adapter'}"]

    return spoil


def of_another_model(folder: Path, model: Path) -> None:
    write_adapter(folder, make_tiny("qwen3", folder.parent / "other"))


def of_another_rank(folder: Path, model: Path) -> None:
    write_adapter(folder, model, rank=4, r=8)


def truncated(folder: Path, model: Path) -> None:
    file = write_adapter(folder, model) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_weights(model: Path) -> list[str]:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return []


def config(**values: Any) -> Callable[[Path], list[str]]:
    def spoil(model: Path) -> list[str]:
        change(model / "config.json", **values)
        return []

    return spoil


def mixture(name: str = "qwen3-moe", without: str = "", **values: Any) -> Callable[[Path], list[str]]:
    """A mixture of experts with `values` in its config, and without the tensor whose name ends so."""

    def spoil(model: Path) -> list[str]:
        folder = make_tiny(name, model.parent / name)
        change(folder / "config.json", **values)
        tensors = load_file(folder / "model.safetensors")
        kept = {key: tensor for key, tensor in tensors.items() if not without or not key.endswith(without)}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        return ["--model", str(folder)]

    return spoil


def no_file(name: str) -> Callable[[Path], list[str]]:
    def spoil(model: Path) -> list[str]:
        (model / name).unlink()
        return []

    return spoil


def by_transformers(model: Path) -> list[str]:
    glm = write_model(config_of("glm4"), model.parent / "glm4")
    adapter = write_adapter(model.parent / "adapter", model)
    return ["--model", str(glm), "--lora", f"ad={adapter}"]


CASES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "adapter of another model": (with_adapter(of_another_model), "adapter"),
    "adapter of another rank than it says": (with_adapter(of_another_rank), "rank"),
    "adapter of too high a rank": (with_adapter(lambda folder, model: write_adapter(folder, model, rank=300)), "rank"),
    "adapter cut short": (with_adapter(truncated), "adapter_model.safetensors"),
    "adapter with biases": (with_adapter(lambda folder, model: write_adapter(folder, model, bias="all")), "bias"),
    "no adapter": (lambda model: ["--lora", "ad=/nowhere"], "/nowhere"),
    "adapter of a model by transformers": (by_transformers, "need a native family"),
    "no tokenizer": (no_file("tokenizer.json"), "no tokenizer.json in"),
    "no weights": (no_file("model.safetensors"), "safetensors"),
    "weights cut short": (cut_weights, "model.safetensors"),
    "config of another width": (config(intermediate_size=113), "config.json implies"),
    "config with more layers": (config(num_hidden_layers=9), "no weight file holds the tensor"),
    "config with other heads": (config(num_attention_heads=5), "config.json"),
    "config with a wrong type": (config(vocab_size="many"), "vocab_size must be a positive integer"),
    "mixture without one of its experts": (
        mixture(without="layers.2.mlp.experts.5.up_proj.weight"),
        "experts.5.up_proj",
    ),
    "mixture of more experts than there are": (mixture(num_local_experts=9), "config.json implies [9, 64]"),
    "mixture with more experts of a token than there are": (mixture(num_experts_per_tok=9), "more than the 8 experts"),
    "mixture whose groups do not divide": (
        mixture("glm4-moe", n_group=3),
        "n_group 3 does not divide the 8 experts",
    ),
    "config of an unknown class": (
        config(architectures=["NobodyForCausalLM"], model_type="nobody"),
        "NobodyForCausalLM",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_node_that_cannot_start_says_why_and_ends_with_78(
    name: str, tmp_path: Path, redis_server: RedisServer, cluster: str
) -> None:
    model = make_tiny("llama", tmp_path / "llama")
    spoil, why = CASES[name]
    more = spoil(model)
    options = ["--kv-blocks", "50", *([] if "--model" in more else ["--model", str(model)]), *more]
    code, output = warm_start.run("prefill", "--redis-url", redis_server.url, "--cluster", cluster, *options)
    last = output.strip().splitlines()[-1]
    assert code == 78, output
    assert last.startswith("kvrelay: "), output
    assert why in last
    assert "Traceback" not in output


def test_kvrelay_up_ends_with_the_same_sentence_and_code(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "llama")
    cut_weights(model)
    command = [sys.executable, "-m", "kvrelay", "up", "--port", "0", "--model", str(model)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 78, result.stderr
    assert "could not start (exit code 78)" in result.stderr.strip().splitlines()[-1]
