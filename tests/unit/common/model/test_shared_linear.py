"""A model on shared packed weights computes exactly what one on private weights does, and reads none of them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import make_tiny

from common.kernels.native.find import find_native
from common.kernels.native.kernels import NativeKernels
from common.kernels.native.linear import NativeLinear
from common.model import weights as weight_sources
from common.model.build import Build
from common.model.config import load_model_config
from common.model.decoder import DecoderModel
from common.model.description import MixtureDescription
from common.model.loader import load_model
from common.model.mixture.experts import ExpertLoop
from common.model.packed_weights import PackedWeights
from common.model.precision import FLOAT32
from common.model.weights import CheckpointWeights

pytestmark = pytest.mark.skipif(find_native() is None, reason="no native kernels")


@pytest.fixture
def packed(tmp_path: Path) -> Iterator[PackedWeights]:
    with closing(PackedWeights(tmp_path / "weights", "model", 1.0)) as opened:
        yield opened


def load(path: Path, packed: PackedWeights | None, **options: Any) -> DecoderModel:
    options = {"dtype": "bfloat16", "load_format": "auto", **options}
    return load_model(path, load_model_config(path), seed=0, small_batches=True, packed=packed, **options)


def logits(model: DecoderModel) -> torch.Tensor:
    with torch.inference_mode():
        found = model.logits(torch.linspace(-1, 1, 2 * model.config.hidden_size).view(2, -1).to(model.precision.weight))
    assert found is not None
    return found


def tensors_of(model: DecoderModel) -> list[torch.Tensor]:
    [stack] = model._layers
    layers: list[Any] = [layer._layer for layer in getattr(stack, "_layers", [])]  # pyright: ignore[reportPrivateUsage]
    linears = [each for layer in layers for each in (layer.attention.qkv, layer.mlp.up, layer.mlp.down)]
    return [getattr(linear, "base", linear).packed.weight for linear in linears]


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_shared_weights_are_those_that_would_be_private(
    packed: PackedWeights, tmp_path: Path, family: str, load_format: str, quantization: str
) -> None:
    path = make_tiny(family, tmp_path / "model")
    options = {"load_format": load_format, "quantization": quantization}
    private = load(path, None, **options)
    for _ in range(2):
        shared = load(path, packed, **options)
        assert torch.equal(logits(shared), logits(private))
        for ours, theirs in zip(tensors_of(shared), tensors_of(private), strict=True):
            assert torch.equal(ours, theirs)


def test_a_second_start_reads_no_matrix(packed: PackedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny("llama", tmp_path / "model")
    load(path, packed)
    names: list[str] = []
    read = weight_sources.CheckpointWeights.read
    monkeypatch.setattr(
        weight_sources.CheckpointWeights,
        "read",
        lambda self, name, *rest: names.append(name) or read(self, name, *rest),
    )
    load(path, packed)
    assert names
    assert not [name for name in names if "norm" not in name]


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_the_experts_of_a_layer_are_one_file(packed: PackedWeights, tmp_path: Path, name: str) -> None:
    """A file takes a descriptor as long as it is mapped, and a model may have ten thousand experts."""
    path = make_tiny(name, tmp_path / "model")
    config = load_model_config(path)
    mixture = config.layers[2].mlp
    native = find_native()
    assert isinstance(mixture, MixtureDescription)
    assert native is not None
    build = Build(config, CheckpointWeights(path), FLOAT32, kernels=NativeKernels(native))
    private, *shared = (
        ExpertLoop(replace(build, packed=each), "model.layers.2.", mixture) for each in (None, packed, packed)
    )
    for loop in shared:
        for ours, theirs in zip((*loop.gate_ups, *loop.downs), (*private.gate_ups, *private.downs), strict=True):
            assert isinstance(ours, NativeLinear)
            assert isinstance(theirs, NativeLinear)
            assert torch.equal(ours.packed.weight, theirs.packed.weight)
            x = torch.ones(1, ours.packed.shape[1])
            assert torch.equal(ours.forward(x), theirs.forward(x))
    files = [file for file in (tmp_path / "weights").rglob("*") if file.is_file() and len(file.name) == 32]
    assert len(files) == 1


def test_weights_of_another_quantization_are_packed_apart(packed: PackedWeights, tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "model")
    kept = [tensors_of(load(path, packed, quantization=each))[0].dtype for each in ("auto", "int8", "auto")]
    assert kept == [torch.bfloat16, torch.int8, torch.bfloat16]


def test_the_embedding_is_a_view_of_the_checkpoint_s_file(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "model")
    model = load(path, None, dtype="auto")
    address: int = model._embedding._weight.data_ptr()  # pyright: ignore
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
    assert any(lo <= address < hi for lo, hi in spans)
