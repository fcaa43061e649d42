"""The interface of kernels: operations other than matrix products and attention. Called on a rank's engine thread."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Rotation(Protocol):
    """One step's rotary embedding, shared by all layers."""

    def rotate_(self, qk: Tensor, num_q: int) -> None:
        """Rotate in place. qk: [T, q_heads + kv_heads, head_dim], q's `num_q` heads first."""
        ...


class Rotary(Protocol):
    """Rotary embedding of pairs (i, i + head_dim / 2)."""

    def step(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions: [T] int64, which must stay as they are until the step's last layer; dtype: of q and k."""
        ...


class Kernels(Protocol):
    """Norms, activation and rotary embedding on one device. Methods ending in `_` overwrite their arguments."""

    def with_norm_offset(self, offset: float) -> Kernels:
        """The same kernels, with norms that add `offset` to the weights given to `norm_weight`."""
        ...

    def norm_weight(self, weight: Tensor) -> Tensor:
        """`weight` in the form that the norms below take. Called once, while loading."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last axis. x: [T, hidden], left as it is."""
        ...

    def add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `x` to `residual` in place; returns the norm of that sum, which may lie in `x`. Both [T, hidden]."""
        ...

    def head_weights(self, q: Tensor, k: Tensor, num_q: int, num_kv: int) -> Tensor:
        """The norm weights ([head_dim] each) of q's and k's heads in the form that `norm_heads` takes."""
        ...

    def norm_heads(self, qk: Tensor, weights: Tensor, num_q: int, eps: float) -> Tensor:
        """RMS norm of each head; may overwrite `qk`. qk: [T, q_heads + kv_heads, head_dim]."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up; may overwrite its argument. gate_up: [T, 2 * inner]. Returns [T, inner]."""
        ...

    def rotary(self, inverse_frequencies: Tensor, max_positions: int, factor: float = 1.0) -> Rotary:
        """Rotation of positions below `max_positions`. inverse_frequencies: [head_dim / 2] float32, on the model's device. `factor`
        multiplies the rotated numbers."""
        ...
