"""`kvrelay up` with the real services: a service that cannot start reports why in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support import warm_start
from support.gguf_files import Kind, write_gguf
from support.oracle import make_tiny
from support.ports import free_port
from support.quantized_checkpoints import STYLES, quantize


def failed_start(model: Path, *args: str) -> str:
    """The last line of a `kvrelay up` that ends by itself with the exit code of a configuration error."""
    code, output = warm_start.run("up", "--port", str(free_port()), "--model", str(model), *args)
    assert code == 78, output
    assert "Traceback" not in output
    return output.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("up") / "tiny")


def test_missing_model_folder_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in failed_start(tmp_path / "nowhere")


def test_corrupt_weights_are_named(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors" in failed_start(tmp_path)


def test_kv_cache_too_small_for_any_request_is_refused(model: Path) -> None:
    assert "kv" in failed_start(model, "--kv-memory-gb", "0.000001").lower()


def test_quantized_weights_without_their_scales_are_named(model: Path, tmp_path: Path) -> None:
    quantized, _ = quantize(model, STYLES["gptq"], tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, quantized / "model.safetensors")
    assert "holds the tensor model.layers.0.mlp.up_proj.scales" in failed_start(quantized)


def test_a_truncated_gguf_file_is_named(model: Path, tmp_path: Path) -> None:
    file, _ = write_gguf(model, tmp_path, lambda name, weight: Kind.F16)
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file} is not a GGUF file, or is truncated" in failed_start(file)
