"""The kernels of flashinfer, for CUDA and 16-bit floats: one launch each, on q and k where they lie.

The sum of `add_rms_norm_` is rounded to 16 bits only for the residual; its norm takes the sum in float32. An offset of 1
is added to norm weights in float32 too: in bfloat16 the sum would lose up to 0.4 % of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from common.kernels.base import Kernels, Rotary
from common.kernels.torch_kernels import TORCH

HEAD_DIMS = (64, 128, 256)
"""Head sizes for which flashinfer compiles attention, KV append and rope."""
DTYPES = (torch.bfloat16, torch.float16)
_ALIGNED_BYTES = 16
"""Alignment of rows of gate and of up. One thread loads as many bytes at once."""


class FlashInferKernels(Kernels):
    """`Kernels` on CUDA for activations and norm weights of one of `DTYPES`."""

    def __init__(self, flashinfer: ModuleType, norm_offset: float = 0.0) -> None:
        self._flashinfer = flashinfer
        self._norm_offset = norm_offset
        self._adds_one = norm_offset == 1.0
        self._rms_norm = flashinfer.gemma_rmsnorm if self._adds_one else flashinfer.rmsnorm
        self._add_rms_norm = flashinfer.gemma_fused_add_rmsnorm if self._adds_one else flashinfer.fused_add_rmsnorm
        self._silu_and_mul = flashinfer.silu_and_mul

    def with_norm_offset(self, offset: float) -> FlashInferKernels:
        return FlashInferKernels(self._flashinfer, offset)

    def norm_weight(self, weight: Tensor) -> Tensor:
        return weight if self._adds_one or not self._norm_offset else weight + self._norm_offset

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._rms_norm(x, weight, eps)

    def add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._add_rms_norm(x, residual, weight, eps)
        return x

    def head_weights(self, q: Tensor, k: Tensor, num_q: int, num_kv: int) -> Tensor:
        return torch.stack((q, k))

    def norm_heads(self, qk: Tensor, weights: Tensor, num_q: int, eps: float) -> Tensor:
        for part, weight in ((qk[:, :num_q], weights[0]), (qk[:, num_q:], weights[1])):
            if self._adds_one:  # that kernel takes rows of one stride only
                part.copy_(self._rms_norm(part.reshape(-1, part.size(-1)), weight, eps).view(part.shape))
            else:
                self._rms_norm(part, weight, eps, out=part)
        return qk

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.size(-1) // 2 * gate_up.element_size() % _ALIGNED_BYTES:
            return TORCH.silu_and_mul(gate_up)
        return self._silu_and_mul(gate_up)

    def rotary(self, inverse_frequencies: Tensor, max_positions: int, factor: float = 1.0) -> Rotary:
        if 2 * inverse_frequencies.numel() not in HEAD_DIMS:
            return TORCH.rotary(inverse_frequencies, max_positions, factor)
        apply_rope = self._flashinfer.apply_rope_with_cos_sin_cache_inplace
        return _TabledRotary(apply_rope, inverse_frequencies, max_positions, factor)


@dataclass(frozen=True)
class _TabledRotation:
    apply_rope: Callable[..., None]
    positions: Tensor
    cos_sin: Tensor
    """[positions, head_dim] float32, cosines in the first half."""

    def rotate_(self, qk: Tensor, num_q: int) -> None:
        self.apply_rope(self.positions, qk[:, :num_q], qk[:, num_q:], qk.size(-1), self.cos_sin)


class _TabledRotary:
    """`Rotary` with a table of the cosines and sines of all positions."""

    def __init__(
        self, apply_rope: Callable[..., None], inverse_frequencies: Tensor, max_positions: int, factor: float
    ) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32, device=inverse_frequencies.device)
        angles = positions[:, None] * inverse_frequencies
        self._apply_rope = apply_rope
        self._cos_sin = torch.cat((angles.cos(), angles.sin()), -1) * factor

    def step(self, positions: Tensor, dtype: torch.dtype) -> _TabledRotation:
        return _TabledRotation(self._apply_rope, positions, self._cos_sin)
