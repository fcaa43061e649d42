"""Linear layers on int8 weights and dynamically quantized int8 activations, and int8 weights of checkpoints. They are read
on a rank's main thread, and multiplied on its engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.base.errors import ConfigError
from common.kernels.cuda_quantized import QuantizedKernels, find_quantized_kernels
from common.kernels.native.kernels import NativeKernels
from common.kernels.native.linear import NativeLinear, pack_int8
from common.model.formats.base import Linear, LinearTarget, StoredTensor
from common.model.formats.quantization import Int8Quantization
from common.model.tensor_files import Part, TensorFiles

_MAX = 127
_MIN_SCALE = 1e-20
CHUNK_WEIGHTS = 2**19
"""Weights that are quantized at a time: few enough to stay in a processor's cache, and an LM head takes no second copy in
float32."""
_CUDA_MIN_ROWS = 17
"""cuBLAS multiplies int8 matrices of at least this many rows, whose sides are multiples of 8."""


@dataclass(frozen=True)
class Int8Weight:
    """A rank's part of a matrix: weight = scale * code.

    codes: [out, in] int8; scale: [out] float32.
    """

    codes: Tensor
    scale: Tensor

    def cut(self, part: Part | None) -> Int8Weight:
        """The part of this matrix. A part of the inputs keeps the scales of whole rows."""
        if part is None:
            return self
        codes = self.codes.narrow(part.dim, part.lo, part.hi - part.lo)
        return Int8Weight(codes, self.scale[part.lo : part.hi] if part.dim == 0 else self.scale)

    def dequantized(self) -> Tensor:
        """[out, in] float32."""
        return self.codes.float() * self.scale[:, None]


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Round each row of `weight` to 255 steps, symmetric around zero. weight: [out, in] of any floating-point type."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.size(0), device=weight.device)
    rows = max(1, CHUNK_WEIGHTS // weight.size(1))
    for at in range(0, weight.size(0), rows):
        wide = weight[at : at + rows].float()
        own = scale[at : at + rows]
        torch.div(wide.abs().amax(1), _MAX, out=own).clamp_(min=_MIN_SCALE)
        codes[at : at + rows] = (wide / own[:, None]).round_()
    return Int8Weight(codes, scale)


def stack_int8(weights: Sequence[Int8Weight]) -> Int8Weight:
    """The rows of several matrices, one after the other."""
    return Int8Weight(torch.cat([each.codes for each in weights]), torch.cat([each.scale for each in weights]))


def make_int8_linear(weight: Int8Weight, bias: Tensor | None, target: LinearTarget) -> Linear:
    """The fastest implementation of `Int8Linear` here. bias: [out]."""
    kernels = target.kernels
    if isinstance(kernels, NativeKernels):
        return NativeLinear(kernels.native, pack_int8(weight.codes, weight.scale, is_paired=target.is_paired), bias)
    cuda = find_quantized_kernels(weight.codes.device)
    return Int8Linear(weight, bias) if cuda is None else CudaInt8Linear(weight, bias, cuda)


class Int8Linear:
    """y = x W^T + b. The reference of every implementation, and the fallback.

    Each row of x is rounded to q = round(x / s) with s = max|x| / 127, half to even; the products of q and the codes are
    summed as integers, exactly, then multiplied by s and by the output's scale in float32.
    """

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        """bias: [out]."""
        self._scale = weight.scale.contiguous()
        self._bias = None if bias is None else bias.float()
        self._is_cuda = weight.codes.is_cuda
        codes = weight.codes
        if self._is_cuda:
            codes = F.pad(codes, (0, -codes.size(1) % 8, 0, -codes.size(0) % 8))
        self._columns = codes.t()

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        wide = x.float()
        scale = (wide.abs().amax(1, keepdim=True) / _MAX).clamp_(min=_MIN_SCALE)
        out = self._sums((wide / scale).round_().to(torch.int8)).mul_(scale).mul_(self._scale)
        return (out if self._bias is None else out.add_(self._bias)).to(dtype or x.dtype)

    def _sums(self, rows: Tensor) -> Tensor:
        """The integer products of `rows`, [T, in] int8, and the codes: [T, out], in float32."""
        if not self._is_cuda:
            return torch.ops.aten._int_mm(rows, self._columns).float()
        num_rows, num_in = rows.shape
        padded = F.pad(rows, (0, -num_in % 8, 0, max(0, _CUDA_MIN_ROWS - num_rows)))
        return torch.ops.aten._int_mm(padded, self._columns)[:num_rows, : self._scale.numel()].float()


class CudaInt8Linear(Int8Linear):
    """`Int8Linear` on a GPU, with one kernel before the product and one after it."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None, kernels: QuantizedKernels) -> None:
        """bias: [out]."""
        super().__init__(weight, bias)
        self._kernels = kernels

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        codes, scale = self._kernels.quantize_int8(x, max(_CUDA_MIN_ROWS, x.size(0)), self._columns.size(0))
        sums = torch.ops.aten._int_mm(codes, self._columns)
        return self._kernels.scale(sums, scale, self._scale, self._bias, dtype or x.dtype)


class Int8Format:
    """`LinearFormat` of matrices in int8 with a scale for each output or tensor, as compressed-tensors stores them
    ("int-quantized"). Activations are quantized by `Int8Linear`'s rule, whatever the checkpoint says."""

    def __init__(self, tensors: TensorFiles, device: torch.device, quantization: Int8Quantization) -> None:
        self._tensors = tensors
        self._device = device

    def holds(self, name: str) -> bool:
        return self._tensors.dtype(name) == "I8"

    def read(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        return self._weight(stored).dequantized().to(dtype)

    def linear(self, stacked: Sequence[StoredTensor], bias: Tensor | None, target: LinearTarget) -> Linear:
        return make_int8_linear(stack_int8([self._weight(stored) for stored in stacked]), bias, target)

    def _weight(self, stored: StoredTensor) -> Int8Weight:
        codes = self._tensors.read(stored.name, stored.shape, stored.part).to(self._device, copy=True)
        name = f"{stored.name}_scale"
        scale = self._tensors.read(name).to(self._device, torch.float32).flatten()
        if scale.numel() not in (1, stored.shape[0]):
            raise ConfigError(
                f"{self._tensors.file_of(name)}: tensor {name} has {scale.numel()} numbers, not one for the matrix or "
                f"each of its {stored.shape[0]} rows"
            )
        scale = scale.expand(stored.shape[0])
        part = stored.part
        return Int8Weight(codes, (scale if part is None or part.dim else scale[part.lo : part.hi]).contiguous())
