"""Rotary embeddings of a rank's layers, from `RopeConfig`. Runs on a rank's engine thread, under inference mode."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.base.errors import ConfigError
from common.kernels.base import Kernels, Rotary, Rotation
from common.kernels.torch_kernels import TORCH
from common.model.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[rotated_dim / 2], float32. Sources: Llama 3.1's reference code ("llama3"), arXiv 2309.00071 ("yarn"),
    arXiv 2402.13753 ("longrope")."""
    dim = rope.rotated_dim(head_dim)
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind in ("factors", "longrope"):
        if len(rope.factors) != inv_freq.numel():
            raise ConfigError(f"the model gives {len(rope.factors)} rope factors for {inv_freq.numel()} frequencies")
        return inv_freq / torch.tensor(rope.factors)
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq)
    return _yarn(rope, inv_freq, dim) if rope.kind == "yarn" else inv_freq


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    wavelength = 2 * math.pi / inv_freq
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelength > low_wavelength, inv_freq / rope.factor, inv_freq)
    middle = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(middle, blended, scaled)


def _yarn(rope: RopeConfig, inv_freq: Tensor, dim: int) -> Tensor:
    """Frequencies that turn often within the original context stay, slow ones are divided, those between are blended."""

    def index_of(rotations: float) -> float:
        return dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = index_of(rope.high_freq_factor), index_of(rope.low_freq_factor)
    if rope.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (torch.arange(inv_freq.size(0), dtype=torch.float32) - first) / max(last - first, 0.001)
    slow = ramp.clamp_(0, 1)
    return inv_freq / rope.factor * slow + inv_freq * (1 - slow)


class _NoRotary:
    """`Rotary` and `Rotation` of layers without one: q and k stay as they are."""

    def step(self, positions: Tensor, dtype: torch.dtype) -> _NoRotary:
        return self

    def rotate_(self, qk: Tensor, num_q: int) -> None:
        return


@dataclass(frozen=True)
class _PartialRotation:
    """`Rotation` of the first `dim` features of each head."""

    whole: Rotation
    dim: int

    def rotate_(self, qk: Tensor, num_q: int) -> None:
        self.whole.rotate_(qk[:, :, : self.dim], num_q)


@dataclass(frozen=True)
class _PartialRotary:
    whole: Rotary
    dim: int

    def step(self, positions: Tensor, dtype: torch.dtype) -> _PartialRotation:
        return _PartialRotation(self.whole.step(positions, dtype), self.dim)


def make_rotary(
    rope: RopeConfig | None, head_dim: int, max_positions: int, kernels: Kernels, device: torch.device
) -> Rotary:
    """The rotary embedding of a layer; parts of heads are rotated by PyTorch's operations."""
    if rope is None:
        return _NoRotary()
    frequencies = inverse_frequencies(rope, head_dim).to(device)
    dim = 2 * frequencies.size(0)  # an odd number of features is rounded up, as in transformers
    if dim == head_dim:
        return kernels.rotary(frequencies, max_positions, rope.attention_factor)
    return _PartialRotary(TORCH.rotary(frequencies, max_positions, rope.attention_factor), dim)
