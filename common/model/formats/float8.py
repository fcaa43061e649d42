"""Weights in e4m3 with scales: dequantized when they are read, or multiplied directly if the device supports it.

Runs on a rank's main thread while it loads and on its engine thread.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.base.errors import ConfigError
from common.kernels.cuda_quantized import QuantizedKernels, find_quantized_kernels
from common.kernels.float8 import E4M3, E4M3_MAX, widen
from common.model.formats.base import LinearTarget, StoredTensor
from common.model.formats.quantization import Fp8Quantization
from common.model.tensor_files import TensorFiles

log = logging.getLogger(__name__)

_BLOCK = 128
"""Side of a weight block, and number of consecutive activations of a row, that share a scale in matrix units."""
_BLOCK_ROWS = 4
"""Activations in blocks have a number of rows that is a multiple of this."""
_FEW_ROWS = 256
"""Rows up to which products without scales of rows are faster on an H200, by up to 1.9 times."""
_ALIGNED = 16
"""Matrix units take only sides that are multiples of this."""


@dataclass(frozen=True)
class Fp8Weight:
    """A matrix, or this rank's part of one, as it is stored.

    values: [out, in] e4m3; scale: float32, [out, 1], or [out / 128, in / 128] if `is_blocked`.
    """

    values: Tensor
    scale: Tensor
    is_blocked: bool

    @property
    def is_aligned(self) -> bool:
        """Whether matrix units take it."""
        return not any(side % (_BLOCK if self.is_blocked else _ALIGNED) for side in self.values.shape)

    def dequantized(self) -> Tensor:
        """[out, in] float32."""
        block = (_BLOCK, _BLOCK) if self.is_blocked else (1, self.values.size(1))
        return dequantize(self.values, self.scale, block, (0, 0))


class Fp8Format:
    """`LinearFormat` of matrices in e4m3."""

    def __init__(self, tensors: TensorFiles, device: torch.device, quantization: Fp8Quantization) -> None:
        self._tensors = tensors
        self._device = device
        self._block = quantization.block

    def holds(self, name: str) -> bool:
        return self._tensors.dtype(name) == "F8_E4M3"

    def read(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        """Dequantized on the device, times their scales."""
        values = self._tensors.read(stored.name, stored.shape, stored.part)
        scale, block = self._scale(stored)
        lo, dim = (0, 0) if stored.part is None else (stored.part.lo, stored.part.dim)
        start = (0, lo) if dim else (lo, 0)
        return dequantize(values.to(self._device), scale, block, start).to(dtype)

    def linear(self, stacked: Sequence[StoredTensor], bias: Tensor | None, target: LinearTarget) -> Fp8Linear | None:
        """None also on a CPU: its FP8 products are slower than those of any other type."""
        found: list[Fp8Weight] = []
        for stored in stacked:
            _, block = self._scale(stored)
            if not can_multiply(self._device, blocked=not _is_row_wise(block, stored)):
                return None
            weight = self.read_packed(stored)
            if weight is None:
                return None
            found.append(weight)
        joined = join(found)
        return None if joined is None else make_fp8_linear(joined, bias)

    def read_packed(self, stored: StoredTensor) -> Fp8Weight | None:
        """The matrix as it is stored; None if its blocks are not those of matrix units, or are cut by the part."""
        scale, block = self._scale(stored)
        part = stored.part
        if _is_row_wise(block, stored):
            each_row = scale.expand(stored.shape[0], 1)
            own = each_row[part.lo : part.hi] if part is not None and part.dim == 0 else each_row
            return Fp8Weight(self._values(stored), own.contiguous(), is_blocked=False)
        if block != (_BLOCK, _BLOCK) or (part is not None and (part.lo % _BLOCK or part.hi % _BLOCK)):
            return None
        if part is not None:
            scale = scale.narrow(part.dim, part.lo // _BLOCK, (part.hi - part.lo) // _BLOCK)
        return Fp8Weight(self._values(stored), scale.contiguous(), is_blocked=True)

    def _values(self, stored: StoredTensor) -> Tensor:
        return self._tensors.read(stored.name, stored.shape, stored.part).to(self._device, copy=True)

    def _scale(self, stored: StoredTensor) -> tuple[Tensor, tuple[int, int]]:
        """The scales of the whole matrix, [rows, columns] of blocks, float32 on the device, and a block's size."""
        name, shape = stored.name, stored.shape
        file = self._tensors.file_of(name)
        names = [f"{name}_scale", f"{name}_scale_inv"]
        found = next((scale for scale in names if scale in self._tensors), None)
        if found is None or len(shape) != 2:
            raise ConfigError(f"{file}: tensor {name} is FP8, and no weight file holds its scale {names[0]}")
        scale = self._tensors.read(found).to(self._device, torch.float32)
        rows, columns = shape
        if scale.numel() == 1:
            return scale.reshape(1, 1), (rows, columns)
        if scale.numel() == rows and scale.size(0) == rows:
            return scale.reshape(rows, 1), (1, columns)
        block = self._block
        if block is None or tuple(scale.shape) != (-(-rows // block[0]), -(-columns // block[1])):
            raise ConfigError(
                f"{file}: tensor {found} has shape {list(scale.shape)}, which fits neither the matrix {list(shape)}, "
                f"its rows nor its blocks of {block}"
            )
        return scale, block


def _is_row_wise(block: tuple[int, int], stored: StoredTensor) -> bool:
    """Whether each row has one scale, or the whole matrix has."""
    return block in ((1, stored.shape[1]), stored.shape)


def dequantize(values: Tensor, scale: Tensor, block: tuple[int, int], start: tuple[int, int]) -> Tensor:
    """`values`, each times its block's scale, float32.

    values: [rows, columns] e4m3, cut out of a whole matrix at `start`; scale: the whole matrix' float32 scales,
    [ceil(rows / block[0]), ceil(columns / block[1])].
    """
    rows, columns = (
        torch.arange(lo, lo + size, device=values.device) // side
        for lo, size, side in zip(start, values.shape, block, strict=True)
    )
    wide = widen(values)
    if scale.size(1) == 1:
        return wide.mul_(scale.index_select(0, rows))
    # Block by block of rows, so that no second matrix of this size is made.
    ends = torch.searchsorted(rows, rows.unique(), right=True).tolist()
    for lo, hi in zip([0, *ends[:-1]], ends, strict=True):
        wide[lo:hi].mul_(scale[int(rows[lo])].index_select(0, columns))
    return wide


def join(parts: Sequence[Fp8Weight]) -> Fp8Weight | None:
    """Several matrices one after the other as one; None if they cannot be multiplied as one."""
    if len({part.is_blocked for part in parts}) > 1 or not all(part.is_aligned for part in parts):
        return None
    # PyTorch cannot concatenate e4m3 on some devices.
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(E4M3)
    return Fp8Weight(values, torch.cat([part.scale for part in parts]), parts[0].is_blocked)


def make_fp8_linear(weight: Fp8Weight, bias: Tensor | None) -> Fp8Linear:
    """The fastest implementation of `Fp8Linear` here. bias: [out], of the dtype of activations."""
    cuda = find_quantized_kernels(weight.values.device)
    return Fp8Linear(weight, bias) if cuda is None else CudaFp8Linear(weight, bias, cuda)


class Fp8Linear:
    """y = x W^T + b on weights in e4m3. Each row of x, or every 128 values of it, is scaled to e4m3 by its own maximum.

    Used only if `can_multiply`. Figures: docs/benchmarks.md, "GPUs".
    """

    def __init__(self, weight: Fp8Weight, bias: Tensor | None) -> None:
        """bias: [out], of the dtype of activations."""
        self._values = weight.values.t()
        self._bias = bias
        self._is_blocked = weight.is_blocked
        self._scale = _block_scales(weight.scale) if weight.is_blocked else weight.scale.t().contiguous()

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        out = (self._times_blocks(x) if self._is_blocked else self._times_rows(x)).to(dtype or x.dtype)
        return out if self._bias is None else out.add_(self._bias)

    def _times_rows(self, x: Tensor) -> Tensor:
        """Returns [T, out] bfloat16."""
        rows, scale = self._quantize_rows(x)
        values = self._values
        return torch.ops.aten._scaled_mm(
            rows, values, scale, self._scale, out_dtype=torch.bfloat16, use_fast_accum=x.is_cuda
        )

    def _times_blocks(self, x: Tensor) -> Tensor:
        """Returns [T, out] bfloat16."""
        rows, scale = self._quantize_blocks(x, x.size(0) + -x.size(0) % _BLOCK_ROWS)
        return F.scaled_mm(
            rows,
            self._values,
            scale,
            F.ScalingType.BlockWise1x128,
            self._scale,
            F.ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )[: x.size(0)]

    def _quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, in] e4m3, and the rows' scales, [T, 1] float32."""
        return _to_e4m3(x, x.abs().amax(1, keepdim=True).float())

    def _quantize_blocks(self, x: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """[num_rows, in] e4m3, and the scales of the rows' blocks, [num_rows, in / 128] float32, column after column."""
        padded = F.pad(x, (0, 0, 0, num_rows - x.size(0)))
        pieces = padded.view(num_rows, -1, _BLOCK)
        rows, scale = _to_e4m3(pieces, pieces.abs().amax(2, keepdim=True).float())
        return rows.view(padded.shape), scale[..., 0].t().contiguous().t()


class CudaFp8Linear(Fp8Linear):
    """`Fp8Linear` on a GPU: one kernel quantizes activations. Few rows take faster products, without scales of rows, which
    another kernel applies afterwards."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, kernels: QuantizedKernels) -> None:
        """bias: [out], of the dtype of activations."""
        super().__init__(weight, bias)
        self._kernels = kernels
        self._one = torch.ones((), device=weight.values.device)
        self._wide_bias = None if bias is None else bias.float()

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self._is_blocked or x.size(0) > _FEW_ROWS:
            return super().forward(x, dtype)
        rows, scale = self._quantize_rows(x)
        sums = torch.ops.aten._scaled_mm(
            rows, self._values, self._one, self._one, out_dtype=torch.float32, use_fast_accum=True
        )
        return self._kernels.scale(sums, scale, self._scale, self._wide_bias, dtype or x.dtype)

    def _quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, scale = self._kernels.quantize_e4m3(x)
        return rows, scale[:, None]

    def _quantize_blocks(self, x: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        return self._kernels.quantize_e4m3_blocks(x, num_rows)


def _to_e4m3(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """`x` in e4m3, and its float32 scales, of the shape of `largest`."""
    scale = largest.div(E4M3_MAX).clamp_(min=1e-12)
    return (x.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def _block_scales(scale: Tensor) -> Tensor:
    """[out / 128, in / 128] in cuBLAS's layout: padded to a multiple of 4 blocks along `in`, then transposed."""
    return F.pad(scale, (0, -scale.size(1) % 4)).t()


def can_multiply(device: torch.device, *, blocked: bool) -> bool:
    """Whether `device` multiplies e4m3 matrices, tried out once: the product must be right."""
    return device.type == "cuda" and _multiplies(device, blocked)


@functools.cache
def _multiplies(device: torch.device, blocked: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_FEW_ROWS + 1, 2 * _BLOCK, generator=generator).bfloat16().to(device)
    values = torch.randn(2 * _BLOCK, 2 * _BLOCK, generator=generator).to(device).to(E4M3)
    scale = torch.rand((2, 2) if blocked else (2 * _BLOCK, 1), generator=generator).add_(0.5).to(device)
    weight = Fp8Weight(values, scale, blocked)
    expected = x.float() @ weight.dequantized().t()
    try:
        linear = make_fp8_linear(weight, None)
        few, many = linear.forward(x[:5]).float() - expected[:5], linear.forward(x).float() - expected
        error = torch.stack((few.abs().max(), many.abs().max())).max() / expected.abs().max()
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as reason:
        log.warning("this device does not multiply FP8 weights, they are dequantized while loading: %s", reason)
        return False
    if not error < 0.1:
        log.warning(
            "this device multiplies FP8 weights wrongly (error %.2f), they are dequantized while loading", error
        )
        return False
    return True
