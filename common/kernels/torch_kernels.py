"""The kernels as plain tensor operations, on any device and in any dtype: used on a CPU, and as the reference.

Norms compute in float32. Rotations compute in the dtype of their input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.kernels.base import Kernels, Rotary


class TorchKernels(Kernels):
    """`Kernels` for any device."""

    def __init__(self, norm_offset: float = 0.0) -> None:
        self._norm_offset = norm_offset

    def with_norm_offset(self, offset: float) -> Kernels:
        return TorchKernels(offset)

    def norm_weight(self, weight: Tensor) -> Tensor:
        return weight.float() + self._norm_offset if self._norm_offset else weight.float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def head_weights(self, q: Tensor, k: Tensor, num_q: int, num_kv: int) -> Tensor:
        return torch.cat((q.expand(num_q, -1), k.expand(num_kv, -1))).float()

    def norm_heads(self, qk: Tensor, weights: Tensor, num_q: int, eps: float) -> Tensor:
        return F.rms_norm(qk.float(), (qk.size(-1),), None, eps).mul_(weights).to(qk.dtype)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def rotary(self, inverse_frequencies: Tensor, max_positions: int, factor: float = 1.0) -> Rotary:
        return TorchRotary(inverse_frequencies, factor)


TORCH = TorchKernels()


@dataclass(frozen=True)
class TorchRotation:
    """`Rotation`: `cos`, and `sin` with its first half negated. Both [T, 1, head_dim]."""

    cos: Tensor
    signed_sin: Tensor

    def rotate_(self, qk: Tensor, num_q: int) -> None:
        swapped = torch.roll(qk, qk.size(-1) // 2, -1)
        qk.mul_(self.cos).addcmul_(swapped, self.signed_sin)


class TorchRotary:
    """`Rotary` whose angles are computed anew for each step."""

    def __init__(self, inverse_frequencies: Tensor, factor: float = 1.0) -> None:
        self._inv_freq = inverse_frequencies
        self._factor = factor

    def step(self, positions: Tensor, dtype: torch.dtype) -> TorchRotation:
        angles = positions[:, None, None].float() * self._inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        return TorchRotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))
