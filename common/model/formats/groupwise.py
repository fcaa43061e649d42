"""Linear layers on 4 or 8 bit weights in groups of inputs that share a scale. Activations stay floating-point numbers, but in
the native kernels of some processors, which round each group of them to 16 bits.

Runs on a rank's main thread while it loads and on its engine thread.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.base.errors import ConfigError
from common.kernels.cuda_quantized import Int4Weight, QuantizedKernels, find_quantized_kernels
from common.kernels.native.kernels import NativeKernels
from common.kernels.native.linear import NativeLinear, pack_int4
from common.model.formats.base import Linear, LinearTarget, StoredTensor
from common.model.formats.floating import float_linear
from common.model.formats.int8 import CHUNK_WEIGHTS

log = logging.getLogger(__name__)

INT4_GROUP = 64
"""Inputs that share a scale where kvrelay itself quantizes."""
_MIN_GROUP = 8
_CLIPS = (1.0, 0.95, 0.9)
"""Parts of a group's range that `quantize_int4` tries."""


@dataclass(frozen=True)
class GroupWeight:
    """A rank's part of a matrix: weight = scale * (code - zero).

    codes: [out, in] uint8, less than 2**bits; scale, zero: [out, in / group] float32, group a multiple of 8.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int

    @property
    def group(self) -> int:
        """Consecutive inputs that share a scale."""
        return self.codes.size(1) // self.scale.size(1)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in]."""
        out, groups = self.scale.shape
        wide = self.codes.view(out, groups, -1).float()
        return wide.sub_(self.zero[..., None]).mul_(self.scale[..., None]).view(out, -1).to(dtype)

    def cut(self, stored: StoredTensor) -> GroupWeight:
        """The part of this whole matrix. Where the part's ends lie within a group, groups are split into smaller ones.

        Raises: ConfigError naming the tensor if groups would become smaller than 8.
        """
        part = stored.part
        if part is None:
            return self
        if part.dim == 0:
            rows = slice(part.lo, part.hi)
            return GroupWeight(self.codes[rows], self.scale[rows], self.zero[rows], self.bits)
        group = math.gcd(self.group, part.lo, part.hi)
        if group % _MIN_GROUP:
            ranks = round(stored.shape[1] / (part.hi - part.lo))
            raise ConfigError(
                f"tensor {stored.name} cannot be split over {ranks} tensor-parallel ranks: its inputs {part.lo} to "
                f"{part.hi} do not end at multiples of {_MIN_GROUP}, and {self.group} of them share a scale"
            )
        groups = torch.arange(part.lo, part.hi, group, device=self.scale.device) // self.group
        scale, zero = self.scale.index_select(1, groups), self.zero.index_select(1, groups)
        return GroupWeight(self.codes[:, part.lo : part.hi], scale, zero, self.bits)


def stack_groups(weights: Sequence[GroupWeight]) -> GroupWeight | None:
    """The rows of several matrices, one after the other; None if they differ in group or bits."""
    if len({(each.group, each.bits) for each in weights}) > 1:
        return None
    codes, scale, zero = (torch.cat([getattr(each, name) for each in weights]) for name in ("codes", "scale", "zero"))
    return GroupWeight(codes, scale, zero, weights[0].bits)


def quantize_int4(weight: Tensor, group: int = INT4_GROUP) -> GroupWeight:
    """Round `weight` to 16 steps in each group, over the part of its range that gives the least squared error.

    weight: [out, in] of any floating-point type; in is a multiple of `group`.
    """
    rows = max(1, CHUNK_WEIGHTS // weight.size(1))
    chunks = [_quantize_groups(chunk.float().view(chunk.size(0), -1, group)) for chunk in weight.split(rows)]
    codes, scale, zero = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return GroupWeight(codes.view(weight.shape), scale, zero, 4)


def _quantize_groups(wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """wide: [rows, groups, group] float32. Returns codes of that shape, and the groups' scale and zero."""
    lo, hi = wide.aminmax(dim=2, keepdim=True)
    best: list[Tensor] = []
    for clip in _CLIPS:
        scale = ((hi - lo) * (clip / 15)).clamp_(min=1e-20)
        zero = -(lo * clip) / scale
        codes = (wide / scale).add_(zero).round_().clamp_(0, 15)
        error = torch.sub(codes, zero).mul_(scale).sub_(wide).square_().sum(2, keepdim=True)
        found = [error, codes, scale, zero]
        if best:
            is_better = error < best[0]
            found = [torch.where(is_better, new, old) for new, old in zip(found, best, strict=True)]
        best = found
    _, codes, scale, zero = best
    return codes.to(torch.uint8), scale[..., 0], zero[..., 0]


def make_group_linear(weight: GroupWeight, bias: Tensor | None, target: LinearTarget) -> Linear:
    """The fastest implementation of `GroupLinear` here. bias: [out]."""
    if weight.codes.is_cuda and weight.bits == 4:
        cuda = find_quantized_kernels(weight.codes.device)
        if cuda is None:
            return GroupLinear(weight, bias)
        return CudaInt4Linear(weight, bias, cuda, target.precision.wide)
    kernels = target.kernels
    if isinstance(kernels, NativeKernels) and weight.bits == 4:
        packed = pack_int4(weight.codes, weight.scale, weight.zero, is_paired=target.is_paired)
        return NativeLinear(kernels.native, packed, bias)
    dtype = target.precision.weight
    _log_dequantized(weight.bits, str(dtype))
    return float_linear(weight.dequantized(dtype), bias, target.precision, target.kernels, is_paired=target.is_paired)


@functools.cache
def _log_dequantized(bits: int, dtype: str) -> None:
    log.info(
        "int%d weights are dequantized to %s while loading, because no kernel multiplies them here",
        bits,
        dtype[len("torch.") :],
    )


@functools.cache
def _log_dequantized_always(num_in: int, group: int) -> None:
    log.warning(
        "4 bit weights of %d inputs in groups of %d are dequantized at each product, which is slower", num_in, group
    )


class GroupLinear:
    """y = x W^T + b, on weights that are dequantized to x's dtype at each product. The reference of every implementation."""

    def __init__(self, weight: GroupWeight, bias: Tensor | None) -> None:
        """bias: [out]."""
        self._scale, self._zero, self._bits = weight.scale, weight.zero, weight.bits
        self._codes = weight.codes[:, 0::2] | weight.codes[:, 1::2] << 4 if weight.bits == 4 else weight.codes
        self._bias = bias

    @property
    def weight(self) -> GroupWeight:
        """Kept with two 4 bit codes in a byte."""
        codes = self._codes
        if self._bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
        return GroupWeight(codes, self._scale, self._zero, self._bits)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        bias = None if self._bias is None else self._bias.to(x.dtype)
        return F.linear(x, self.weight.dequantized(x.dtype), bias).to(dtype or x.dtype)


class CudaInt4Linear:
    """`GroupLinear` on a GPU, for 4 bits: one kernel multiplies few rows, another one dequantizes the weights for more.

    Scales and zeros are rounded to the dtype of activations.
    """

    def __init__(self, weight: GroupWeight, bias: Tensor | None, kernels: QuantizedKernels, dtype: torch.dtype) -> None:
        """bias: [out]; dtype: of activations."""
        self._weight = Int4Weight.pack(weight.codes, weight.scale, weight.zero, dtype)
        self._bias = None if bias is None else bias.to(dtype)
        self._kernels = kernels
        if not self._weight.is_tiled:
            _log_dequantized_always(self._weight.num_in, self._weight.group)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self._weight.can_multiply(x.size(0)):
            y = self._kernels.multiply(x, self._weight, self._bias)
        else:
            y = F.linear(x, self._kernels.dequantize(self._weight), self._bias)
        return y.to(dtype or x.dtype)
