"""A linear layer on weights packed once for the native kernels. Runs on a rank's engine thread."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from common.kernels.native.library import BFLOAT16, DTYPES, FLOAT32, LinearStruct, NativeLibrary

_PANEL = 32
"""Outputs of a panel; of a paired one, 16 of each half."""


def pack(weight: Tensor, *, is_paired: bool) -> Tensor:
    """`weight` [out, in] in panels of 32 outputs, as src/api.h says: [panels, in, 32] float32, or bfloat16 in pairs of
    inputs, [panels, in / 2, 32, 2]. What panels have beyond `out` and `in` is zero."""
    out, inputs = weight.shape
    halves = weight.view(2, out // 2, inputs) if is_paired else weight.view(1, out, inputs)
    rows = _PANEL // halves.size(0)
    panels = -(-halves.size(1) // rows)
    in_pair = 2 if weight.dtype == torch.bfloat16 else 1
    pairs = -(-inputs // in_pair)
    missing = (0, pairs * in_pair - inputs, 0, panels * rows - halves.size(1))
    padded = torch.nn.functional.pad(halves, missing) if any(missing) else halves
    split = padded.view(halves.size(0), panels, rows, pairs, in_pair).permute(1, 3, 0, 2, 4)
    return split.reshape(panels, pairs, _PANEL, in_pair).contiguous()


class NativeLinear:
    """`Linear` of float32 or bfloat16 weights."""

    def __init__(self, native: NativeLibrary, weight: Tensor, bias: Tensor | None, *, is_paired: bool = False) -> None:
        """weight: [out, in]. bias: [out]. `is_paired`: two merged layers of equal size, whose outputs lie side by side in
        a panel, so that SiLU-and-mul needs no pass of its own."""
        self._native = native
        self._packed = pack(weight, is_paired=is_paired)
        self._bias = None if bias is None else bias.float().contiguous()
        self._out = weight.size(0)
        self.struct = LinearStruct(
            format=BFLOAT16 if weight.dtype == torch.bfloat16 else FLOAT32,
            out=weight.size(0),
            inputs=weight.size(1),
            is_paired=is_paired,
            weight=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
        )
        self._address = ctypes.addressof(self.struct)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x: [T, in]. Returns a fresh [T, out] of `dtype`, by default that of `x`."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        y = torch.empty(x.size(0), self._out, dtype=dtype or x.dtype)
        native = self._native
        native.linear_forward(
            native.team,
            self._address,
            x.data_ptr(),
            DTYPES[x.dtype],
            x.stride(0),
            y.data_ptr(),
            DTYPES[y.dtype],
            self._out,
            x.size(0),
            0,
        )
        return y
