"""flashinfer's norms, activation and rotary embedding on a GPU, against PyTorch's in float32."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from common.kernels.choose import choose_kernels
from common.kernels.flashinfer_kernels import FlashInferKernels
from common.kernels.torch_kernels import TORCH

GPU = torch.device("cuda", 0)
EPS = 1e-5
HALF_ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11}

pytestmark = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def kernels() -> FlashInferKernels:
    return FlashInferKernels(importlib.import_module("flashinfer"))


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(GPU, dtype)


def close(result: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), exact, atol=2 * HALF_ULP[dtype], rtol=2 * HALF_ULP[dtype])


@pytest.mark.parametrize("hidden", [896, 4096, 8192])
@pytest.mark.parametrize("rows", [1, 77])
def test_norms(dtype: torch.dtype, hidden: int, rows: int) -> None:
    x, weight = random(rows, hidden, dtype=dtype), random(hidden, dtype=dtype)
    residual = random(rows + 1, hidden, dtype=dtype)[1:].clone()
    close(kernels().rms_norm(x, weight, EPS), TORCH.rms_norm(x.float(), weight.float(), EPS), dtype)
    total = residual.float()
    exact = TORCH.add_rms_norm_(x.float(), total, weight.float(), EPS)
    close(kernels().add_rms_norm_(x, residual, weight, EPS), exact, dtype)
    close(residual, total, dtype)


@pytest.mark.parametrize("rows", [1, 77])
def test_norms_add_one_in_float32(dtype: torch.dtype, rows: int) -> None:
    """Weights near 0, as in Gemma's checkpoints: 16 bits of 1 + weight would lose most of them."""
    adding, exact = kernels().with_norm_offset(1.0), TORCH.with_norm_offset(1.0)
    x, residual = random(rows, 2304, dtype=dtype), random(rows + 1, 2304, dtype=dtype)[1:].clone()
    weight = random(2304, dtype=dtype) * 0.003
    ours, own = adding.norm_weight(weight), exact.norm_weight(weight)
    close(adding.rms_norm(x, ours, EPS), exact.rms_norm(x.float(), own, EPS), dtype)
    summed = exact.add_rms_norm_(x.float(), residual.float(), own, EPS)
    close(adding.add_rms_norm_(x, residual, ours, EPS), summed, dtype)
    qkv, head = random(rows, 8 + 4 + 4, 256, dtype=dtype), random(256, dtype=dtype) * 0.003
    before, own = qkv.clone(), exact.norm_weight(head)
    normed = exact.norm_heads(qkv[:, :12].float(), exact.head_weights(own, own, 8, 4), 8, EPS)
    close(adding.norm_heads(qkv[:, :12], adding.head_weights(head, head, 8, 4), 8, EPS), normed, dtype)
    assert torch.equal(qkv[:, 12:], before[:, 12:])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_are_normed_and_rotated_where_they_lie(dtype: torch.dtype, head_dim: int) -> None:
    q_weight, k_weight = random(head_dim, dtype=dtype), random(head_dim, dtype=dtype) + 1
    qkv = random(33, 8 + 2 + 2, head_dim, dtype=dtype)
    before, exact = qkv.clone(), qkv[:, :10].float()
    frequencies = (1.0 / 500000 ** (torch.arange(0, head_dim, 2) / head_dim)).to(GPU)
    positions = torch.arange(33, device=GPU) * 1000
    exact = TORCH.norm_heads(exact, TORCH.head_weights(q_weight.float(), k_weight.float(), 8, 2), 8, EPS)
    normed = kernels().norm_heads(qkv[:, :10], kernels().head_weights(q_weight, k_weight, 8, 2), 8, EPS)
    close(normed, exact, dtype)
    rounded = normed.float()
    TORCH.rotary(frequencies, 40000).step(positions, torch.float32).rotate_(rounded, 8)
    kernels().rotary(frequencies, 40000).step(positions, dtype).rotate_(normed, 8)
    torch.testing.assert_close(normed.float(), rounded, atol=8 * HALF_ULP[dtype], rtol=2 * HALF_ULP[dtype])
    assert torch.equal(qkv[:, 10:], before[:, 10:])


@pytest.mark.parametrize("inner", [4864, 14336, 12])
def test_activations(dtype: torch.dtype, inner: int) -> None:
    gate_up = random(9, 2 * inner, dtype=dtype)
    exact = TORCH.silu_and_mul(gate_up.float())
    torch.testing.assert_close(
        kernels().silu_and_mul(gate_up).float(), exact, atol=4 * HALF_ULP[dtype], rtol=4 * HALF_ULP[dtype]
    )


def test_a_gpu_with_flashinfer_uses_it(dtype: torch.dtype) -> None:
    assert isinstance(choose_kernels(GPU, dtype), FlashInferKernels)
    assert choose_kernels(GPU, torch.float32) is TORCH
