"""Linear layers on weights packed once for the native kernels. Packing and layers run on a rank's threads."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from common.kernels.native.library import BFLOAT16, DTYPES, FLOAT32, FP4, INT4, INT8, LinearStruct, NativeLibrary

PANEL = 32
"""Outputs of a panel; of a paired one, 16 of each half."""


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [out, in] in panels of 32 outputs; the layout is in src/api.h. Panels are padded with zeros."""

    format: int
    shape: tuple[int, int]
    """(out, in)."""
    weight: Tensor
    is_paired: bool = False
    """Two merged layers of equal size, whose outputs lie side by side in a panel, so that SiLU-and-mul needs no pass of
    its own."""
    scale: Tensor | None = None
    zero: Tensor | None = None
    group: int = 0


def pack_float(weight: Tensor, *, is_paired: bool) -> PackedWeight:
    """weight: [out, in], float32 or bfloat16."""
    is_bf16 = weight.dtype == torch.bfloat16
    packed = _interleave(_panels(weight, is_paired), 2 if is_bf16 else 1)
    return PackedWeight(BFLOAT16 if is_bf16 else FLOAT32, (weight.size(0), weight.size(1)), packed, is_paired)


def pack_int8(codes: Tensor, scale: Tensor, *, is_paired: bool) -> PackedWeight:
    """weight = scale * code. codes: [out, in] int8, -127 to 127; scale: [out] float32."""
    packed = _interleave(_panels(codes, is_paired), 4)
    scales = _panels(scale[:, None], is_paired).flatten()
    sums = _panels(codes.sum(1, dtype=torch.float32)[:, None], is_paired).flatten()
    return PackedWeight(INT8, (codes.size(0), codes.size(1)), packed, is_paired, scales, sums)


def pack_int4(codes: Tensor, scale: Tensor, zero: Tensor, *, is_paired: bool = False) -> PackedWeight:
    """weight = scale * (code - zero). codes: [out, in] uint8, 0 to 15; scale, zero: [out, in / group] float32, group a
    multiple of 8."""
    return _pack_groups(INT4, codes, scale, zero, is_paired)


def pack_fp4(codes: Tensor, scale: Tensor, *, is_paired: bool = False) -> PackedWeight:
    """weight = scale * number of the code in e2m1. codes: [out, in] uint8, 0 to 15; scale: [out, in / group] float32, group a
    multiple of 8."""
    return _pack_groups(FP4, codes, scale, None, is_paired)


def _pack_groups(form: int, codes: Tensor, scale: Tensor, zero: Tensor | None, is_paired: bool) -> PackedWeight:
    panels = _panels(codes, is_paired)
    eights = panels.view(panels.size(0), PANEL, -1, 8).int()
    shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32)
    packed = (eights << shifts).sum(3, dtype=torch.int32).transpose(1, 2).contiguous()
    scales, zeros = (
        None if each is None else _panels(each, is_paired).transpose(1, 2).contiguous() for each in (scale, zero)
    )
    group = codes.size(1) // scale.size(1)
    return PackedWeight(form, (codes.size(0), codes.size(1)), packed, is_paired, scales, zeros, group)


def _panels(rows: Tensor, is_paired: bool) -> Tensor:
    """`rows` [out, n] as [panels, 32, n]."""
    halves = rows.view(2, -1, rows.size(1)) if is_paired else rows[None]
    height = PANEL // halves.size(0)
    missing = -halves.size(1) % height
    padded = torch.nn.functional.pad(halves, (0, 0, 0, missing)) if missing else halves
    return padded.unflatten(1, (-1, height)).transpose(0, 1).reshape(-1, PANEL, rows.size(1))


def _interleave(panels: Tensor, unit: int) -> Tensor:
    """[panels, 32, n] as [panels, n / unit, 32, unit], n padded to whole units."""
    missing = -panels.size(2) % unit
    padded = torch.nn.functional.pad(panels, (0, missing)) if missing else panels
    return padded.unflatten(2, (-1, unit)).transpose(1, 2).contiguous()


class NativeLinear:
    """`Linear` on packed weights."""

    def __init__(self, native: NativeLibrary, packed: PackedWeight, bias: Tensor | None) -> None:
        """bias: [out]."""
        self._native = native
        self.packed = packed
        self._bias = None if bias is None else bias.float().contiguous()
        self.struct = LinearStruct(
            packed.format,
            *packed.shape,
            packed.group,
            packed.is_paired,
            *(_address(each) for each in (packed.weight, packed.scale, packed.zero, self._bias)),
        )
        self._struct_address = ctypes.addressof(self.struct)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x: [T, in]. Returns a fresh [T, out] of `dtype`, by default that of `x`."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        rows, out, native = x.size(0), self.packed.shape[0], self._native
        y = torch.empty(rows, out, dtype=dtype or x.dtype)
        x_type, y_type = DTYPES[x.dtype], DTYPES[y.dtype]
        native.linear_forward(
            native.team, self._struct_address, x.data_ptr(), x_type, x.stride(0), y.data_ptr(), y_type, out, rows
        )
        return y

    def multiply_heads(self, x: Tensor, y: Tensor) -> None:
        """y[t, h] = x[t, h] times the matrix of head h: the layer has those of all heads, one after the other, without bias.

        x: [T, heads, in], y: [T, heads, out / heads], of one dtype; out / heads is a multiple of `PANEL`.
        """
        rows, heads, inputs = x.shape
        assert (heads * y.size(2), inputs) == self.packed.shape
        assert y.size(2) % PANEL == 0
        x_row, x_head, x_unit = x.stride()
        y_row, y_head, y_unit = y.stride()
        assert x_unit == y_unit == 1
        native, layer, dtype = self._native, self._struct_address, DTYPES[x.dtype]
        native.heads_forward(
            native.team, layer, heads, x.data_ptr(), x_row, x_head, y.data_ptr(), y_row, y_head, dtype, rows
        )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
