"""flashinfer's kernels and PyTorch's mean the same; flashinfer itself is stood in for by plain operations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support import fake_flashinfer
from support.oracle import make_tiny
from torch import Tensor

from common.attention.base import AttentionMetadata
from common.attention.cpu import CpuAttention
from common.attention.sdpa import SdpaAttention
from common.base.variables import CPU_KERNELS
from common.kernels.base import Kernels
from common.kernels.choose import choose_kernels
from common.kernels.flashinfer_kernels import FlashInferKernels
from common.kernels.library import find_flashinfer
from common.kernels.native.find import find_native
from common.kernels.native.kernels import NativeKernels
from common.kernels.torch_kernels import TORCH
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from common.model.build import Build
from common.model.config import load_model_config
from common.model.decoder import DecoderModel
from common.model.kv_spec import kv_spec
from common.model.precision import Precision
from common.model.rank_model import HIDDEN
from common.model.weights import CheckpointWeights

FLASHINFER = FlashInferKernels(fake_flashinfer)  # pyright: ignore[reportArgumentType]
EPS = 1e-5


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_norms_agree() -> None:
    x, residual, weight = random(5, 96), random(5, 96, 1)[..., 0], random(96)
    ours, theirs = (kernels.rms_norm(x, kernels.norm_weight(weight), EPS) for kernels in (TORCH, FLASHINFER))
    torch.testing.assert_close(theirs, ours)
    sums = []
    for kernels in (TORCH, FLASHINFER):
        total = residual.clone()
        normed = kernels.add_rms_norm_(x.clone(), total, kernels.norm_weight(weight), EPS)
        sums.append((normed, total))
    torch.testing.assert_close(sums[1], sums[0])
    assert torch.equal(sums[0][1], residual + x)


def test_head_norms_agree_where_q_and_k_are_part_of_a_larger_row() -> None:
    q_weight, k_weight, qkv = random(64), random(64, 1)[:, 0] + 2, random(3, 4 + 2 + 2, 64)
    results = []
    for kernels in (TORCH, FLASHINFER):
        row = qkv.clone()
        results.append(kernels.norm_heads(row[:, :6], kernels.head_weights(q_weight, k_weight, 4, 2), 4, EPS))
        assert torch.equal(row[:, 6:], qkv[:, 6:])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("offset", [0.0, 1.0, 0.5])
def test_an_offset_is_added_to_the_weights_of_every_norm(offset: float) -> None:
    x, qk, weight = random(5, 64), random(3, 6, 64), random(64)
    for kernels in (TORCH, FLASHINFER):
        adding = kernels.with_norm_offset(offset)
        own, summed = adding.norm_weight(weight), weight + offset
        torch.testing.assert_close(adding.rms_norm(x, own, EPS), kernels.rms_norm(x, summed, EPS))
        sums = [
            residual.add_rms_norm_(x.clone(), x.clone(), each, EPS)
            for residual, each in ((adding, own), (kernels, summed))
        ]
        torch.testing.assert_close(*sums)
        heads = [
            each.norm_heads(qk.clone()[:, :5], each.head_weights(of, of, 3, 2), 3, EPS)
            for each, of in ((adding, own), (kernels, summed))
        ]
        torch.testing.assert_close(*heads)


def test_an_offset_of_one_is_not_rounded_to_the_weights_dtype() -> None:
    """As in the classes of Gemma: 1 + 0.001 is 1 in bfloat16."""
    x, weight = random(5, 64).bfloat16(), torch.full((64,), 0.001).bfloat16()
    kernels = FLASHINFER.with_norm_offset(1.0)
    assert torch.equal(kernels.norm_weight(weight), weight)
    exact = TORCH.rms_norm(x.float(), 1 + weight.float(), EPS)
    torch.testing.assert_close(kernels.rms_norm(x, kernels.norm_weight(weight), EPS), exact.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("inner", [64, 12, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_agree_whatever_the_width(inner: int, dtype: torch.dtype) -> None:
    gate_up = random(4, 2 * inner).to(dtype)
    torch.testing.assert_close(FLASHINFER.silu_and_mul(gate_up.clone()), TORCH.silu_and_mul(gate_up.clone()))


@pytest.mark.parametrize("head_dim", [64, 128, 32])
def test_rotations_agree(head_dim: int) -> None:
    frequencies = 1.0 / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)
    positions = torch.tensor([0, 1, 17, 99])
    qkv = random(4, 3 + 1 + 1, head_dim)
    results = []
    for kernels in (TORCH, FLASHINFER):
        row = qkv.clone()
        kernels.rotary(frequencies, 100).step(positions, row.dtype).rotate_(row[:, :4], 3)
        assert torch.equal(row[:, 4:], qkv[:, 4:])
        results.append(row)
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(results[0][0], qkv[0])
    assert not torch.allclose(results[0][1, :4], qkv[1, :4])


def logits(path: Path, kernels: Kernels) -> Tensor:
    """Of a chunked prompt, then of a step of two sequences."""
    config = load_model_config(path)
    precision = Precision.choose("float32", small_batches=True)
    layout = KVLayout("f", kv_spec(config, "float32"))
    storage = KVStorage(layout, layout.shard(0, 0), 8)
    with torch.inference_mode():
        model = DecoderModel(Build(config, CheckpointWeights(path), precision, kernels=kernels))
    shape = model.attention_shapes(layout.spec.block_size)[0]
    attention = CpuAttention(storage.groups[0], shape) if kernels is TORCH else SdpaAttention(storage.groups[0], shape)
    results = []
    for lens, contexts in (([9], [9]), ([3], [12]), ([1, 2], [13, 2])):
        slots = [16 * (1 + i) + p for i, (n, c) in enumerate(zip(lens, contexts, strict=True)) for p in range(c - n, c)]
        positions = torch.tensor([slot % 16 for slot in slots])
        attention.plan(AttentionMetadata(lens, contexts, [[1], [2]][: len(lens)], torch.tensor(slots)))
        result = model.logits(model.forward(positions + 5, positions, attention)[HIDDEN])
        assert result is not None
        results.append(result)
    return torch.cat(results)


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
def test_a_model_computes_the_same_with_a_gpus_kernels(tmp_path: Path, name: str) -> None:
    path = make_tiny(name, tmp_path / name)
    torch.testing.assert_close(logits(path, FLASHINFER), logits(path, TORCH), atol=1e-4, rtol=1e-4)


def test_a_cpu_computes_with_native_kernels_if_there_are_any_and_imports_no_flashinfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = choose_kernels(torch.device("cpu"), torch.bfloat16)
    assert isinstance(kernels, NativeKernels) == (find_native() is not None)
    monkeypatch.setenv(CPU_KERNELS, "torch")
    assert choose_kernels(torch.device("cpu"), torch.bfloat16) is TORCH
    assert find_flashinfer(torch.device("cpu")).flashinfer is None
    assert "flashinfer" not in sys.modules
