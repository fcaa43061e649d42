"""`Kernels` on a CPU: norms, SiLU and rotation angles by the native library, the rest by PyTorch.

Whole layers call the library directly: `common.model.native_layer`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from common.kernels.native.library import DTYPES, NativeLibrary, RotationStruct
from common.kernels.torch_kernels import TorchKernels, TorchRotary, TorchRotation

_TABLE_STEP = 1024


class NativeKernels(TorchKernels):
    """For float32 and bfloat16."""

    def __init__(self, native: NativeLibrary, norm_offset: float = 0.0) -> None:
        super().__init__(norm_offset)
        self.native = native

    def with_norm_offset(self, offset: float) -> NativeKernels:
        return NativeKernels(self.native, offset)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x.contiguous(), None, weight, eps)

    def add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert residual.is_contiguous()
        return self._norm(residual, x.contiguous(), weight, eps)

    def _norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(residual)
        native, dtype = self.native, DTYPES[residual.dtype]
        rows, hidden = residual.shape
        given = None if delta is None else delta.data_ptr()
        native.norm(
            native.team, weight.data_ptr(), eps, hidden, dtype, rows, residual.data_ptr(), given, out.data_ptr()
        )
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, half = gate_up.size(0), gate_up.size(1) // 2
        out = torch.empty(rows, half, dtype=gate_up.dtype)
        native = self.native
        native.silu_and_mul(native.team, gate_up.data_ptr(), DTYPES[gate_up.dtype], rows, half, out.data_ptr())
        return out

    def rotary(self, inverse_frequencies: Tensor, max_positions: int, factor: float = 1.0) -> NativeRotary:
        return NativeRotary(self.native, inverse_frequencies, factor)


class NativeRotation:
    """`Rotation`, computed when it is first used: as angles for whole layers, or for PyTorch's operations."""

    def __init__(self, rotary: NativeRotary, positions: Tensor, dtype: torch.dtype) -> None:
        self._rotary = rotary
        self._positions = positions
        self._dtype = dtype
        self._by_torch: TorchRotation | None = None
        self._struct: RotationStruct | None = None

    @property
    def address(self) -> int:
        """Address of this step's struct kv_rotation. Invalid once another step's address was read, which may grow the tables."""
        if self._struct is None:
            self._positions = self._positions.contiguous()
            self._struct = RotationStruct(*self._rotary.tables(self._positions), self._positions.data_ptr())
        return ctypes.addressof(self._struct)

    def rotate_(self, qk: Tensor, num_q: int) -> None:
        if self._by_torch is None:
            self._by_torch = self._rotary.torch_rotary.step(self._positions, self._dtype)
        self._by_torch.rotate_(qk, num_q)


class NativeRotary:
    """`Rotary`."""

    def __init__(self, native: NativeLibrary, inverse_frequencies: Tensor, factor: float = 1.0) -> None:
        self.native = native
        self.factor = factor
        self.inverse_frequencies = inverse_frequencies.float().contiguous()
        self.torch_rotary = TorchRotary(inverse_frequencies, factor)
        self.table = torch.empty(2, 0, self.inverse_frequencies.size(0))
        """[2, positions, frequencies]: cosines and sines of all positions up to the highest that occurred."""
        self._known = 0
        self._addresses = (0, 0)

    def tables(self, positions: Tensor) -> tuple[int, int]:
        """Addresses of cosines and sines, [position][frequency], of at least these positions; valid until they grow."""
        return self.tables_up_to(int(positions.max())) if len(positions) else self._addresses

    def tables_up_to(self, position: int) -> tuple[int, int]:
        """Addresses of cosines and sines of at least the positions up to this one; valid until they grow."""
        if position >= self._known:
            self._grow((position // _TABLE_STEP + 1) * _TABLE_STEP)
        return self._addresses

    def _grow(self, rows: int) -> None:
        half = self.inverse_frequencies.size(0)
        positions = torch.arange(self._known, rows)
        added = torch.empty(2, len(positions), half)
        cos, sin = added.data_ptr(), added[1].data_ptr()
        self.native.rotation_angles(
            self.native.team, positions.data_ptr(), len(positions), self.inverse_frequencies.data_ptr(), half, cos, sin
        )
        self.table = torch.cat((self.table, added * self.factor), 1)
        self._known = rows
        self._addresses = self.table[0].data_ptr(), self.table[1].data_ptr()

    def step(self, positions: Tensor, dtype: torch.dtype) -> NativeRotation:
        return NativeRotation(self, positions, dtype)
