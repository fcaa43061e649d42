"""A cluster whose decode node has four ranks and skewed experts: answers are the reference's before, during and after they move."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fp8_checkpoints import STYLES, quantise
from support.mxfp4_checkpoints import pack_experts
from support.oracle import greedy, write_model
from support.system import System, ranks_of, running_system, wait_until
from transformers import GptOssConfig, Qwen3MoeConfig

EXPERTS, REDUNDANT, TOKENS = 64, 8, 40
BASE = {
    "vocab_size": 270,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
PROMPTS = [[7 * i + j + 3 for j in range(20 + 9 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers whose router's bias prefers the first experts, by about Zipf's law."""
    return make_skewed(tmp_path_factory.mktemp("model") / "skewed", inner=32)


def make_skewed(folder: Path, inner: int) -> Path:
    config = GptOssConfig(
        **BASE,
        intermediate_size=inner,
        num_local_experts=EXPERTS,
        num_experts_per_tok=4,
        sliding_window=64,
        layer_types=["full_attention"] * 2,
    )
    write_model(config, folder)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name in [name for name in weights if name.endswith("router.bias")]:
            weights[name] = -torch.log(torch.arange(1.0, EXPERTS + 1)) * 1.5
        save_file(weights, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def system(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    args = ("--model", str(model), "--dtype", "float32", "--kv-blocks", "400", "--local-prefill-tokens", "0")
    moves = ("--rebalance-experts", "1.1", "--redundant-experts", str(REDUNDANT), "--start-timeout-s", "240")
    with running_system(tmp_path_factory.mktemp("up"), *args, *moves, "--decode-tp", "4") as running:
        running.wait_usable(timeout_s=240)
        yield running


def ask(system: System, prompt: list[int], name: str = "skewed") -> list[int]:
    body = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{system.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=120.0)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def experts(system: System) -> dict[str, Any]:
    return system.admin("experts", "decode-0")["decode-0"]


def serve_until_moved(
    system: System, model: Path, name: str = "skewed", layers: Set[int] = frozenset()
) -> dict[str, Any]:
    """Compare answers with those of `model`, the reference, until a plan has been carried out in each of `layers`."""
    expected = [greedy(model, prompt, TOKENS).tokens for prompt in PROMPTS]
    for _ in range(60):
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert ask(system, prompt, name) == tokens
        found = experts(system)
        moved = {layer for plan in found["plans"] for layer in plan["layers"]}
        if moved and moved >= layers and not found["pending"]:
            return found
    raise AssertionError(f"no plan: {experts(system)}")


def test_answers_stay_while_experts_move_and_the_load_evens_out(system: System, model: Path) -> None:
    before = experts(system)
    assert [layer["slots"][0] for layer in before["layers"]] == [list(range((EXPERTS + REDUNDANT) // 4))] * 2
    found = serve_until_moved(system, model)
    assert found["plans"][0]["layers"] == [0, 1]
    assert "expected" in found["plans"][0]["reason"]
    assert [layer["slots"] for layer in found["layers"]] != [layer["slots"] for layer in before["layers"]]
    for _ in range(4):
        for prompt in PROMPTS:
            assert ask(system, prompt) == greedy(model, prompt, TOKENS).tokens
    loads = [layer["max_over_mean"] for layer in experts(system)["layers"]]
    print(f"load max over mean, by layer: {loads}; {found['plans'][0]['reason']}")
    assert max(loads) <= 1.3, "the load of few tokens is noisy"
    assert "load max over mean" in system.admin_text("experts")
    system.wait_whole()


@pytest.mark.thorough
def test_a_rank_killed_while_experts_move_costs_no_answer(system: System, model: Path) -> None:
    leader = system.kill("decode")
    wait_until(lambda: system.is_restarted("decode", leader), 60, "the node is restarted")
    system.wait_usable(timeout_s=240)
    prompts = PROMPTS * 15
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(ask, system, prompt) for prompt in prompts]
        wait_until(lambda: experts(system)["plans"], 120, "a plan is being carried out")
        os.kill(ranks_of(system.process("decode")["pid"])[1], signal.SIGKILL)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result() == greedy(model, prompt, TOKENS).tokens
    system.wait_whole()


def mxfp4(folder: Path) -> tuple[Path, Path]:
    plain = make_skewed(folder / "plain", inner=64)
    return pack_experts(plain, folder / "packed"), plain


def fp8_blocks(folder: Path) -> tuple[Path, Path]:
    """A random model in FP8 blocks, and the same one dequantized; its router happens to choose some experts more often."""
    config = Qwen3MoeConfig(
        **BASE,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    return quantise(write_model(config, folder / "model"), STYLES["fp8 blocks"], folder)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [mxfp4, fp8_blocks])
def test_scales_move_with_quantized_experts_on_every_stage(
    make: Callable[[Path], tuple[Path, Path]], tmp_path: Path
) -> None:
    quantized, plain = make(tmp_path)
    args = ("--model", str(quantized), "--dtype", "float32", "--kv-blocks", "400", "--local-prefill-tokens", "0")
    moves = ("--rebalance-experts", "1.1", "--redundant-experts", "4", "--start-timeout-s", "240")
    with running_system(tmp_path, *args, *moves, "--decode-tp", "2", "--decode-pp", "2") as system:
        system.wait_usable(timeout_s=240)
        serve_until_moved(system, plain, quantized.name, {0, 1})
        for prompt in PROMPTS:
            assert ask(system, prompt, quantized.name) == greedy(plain, prompt, TOKENS).tokens
        system.wait_whole()
