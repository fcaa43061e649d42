"""Stacked experts in MXFP4, as gpt-oss is published: e2m1 numbers of 4 bits, and a power of two for each 32 inputs.

Used by a rank's main thread while it loads. Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.base.errors import ConfigError
from common.kernels.native.kernels import NativeKernels
from common.kernels.native.linear import NativeLinear, pack_fp4
from common.model.formats.base import LinearTarget, StoredTensor
from common.model.formats.quantization import Mxfp4Quantization
from common.model.tensor_files import Part, TensorFiles

MXFP4_GROUP = 32
BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of the two tensors."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
"""[16] float32: the number of each code."""
_EXPONENT_BIAS = 127
_NO_NUMBER = 255
"""A scale that means not-a-number."""


def powers_of_two(exponents: Tensor) -> Tensor:
    """Convert scales from e8m0 bytes to float32, of the same shape."""
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - _EXPONENT_BIAS)


class Mxfp4Format:
    """`LinearFormat` of tensors [experts, out, in] stored as blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32],
    both of bytes. A byte of a block holds two inputs, the first one in its low bits."""

    def __init__(self, tensors: TensorFiles, device: torch.device, quantization: Mxfp4Quantization) -> None:
        self._tensors = tensors
        self._device = device

    def holds(self, name: str) -> bool:
        return name + BLOCKS in self._tensors

    def read(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        """Dequantized on the device. `stored.part`: a range of experts."""
        codes, scales = self.codes(stored)
        wide = E2M1.to(self._device)[codes.int()].unflatten(-1, (-1, MXFP4_GROUP))
        return wide.mul_(scales[..., None]).flatten(-2).to(dtype)

    def codes(self, stored: StoredTensor) -> tuple[Tensor, Tensor]:
        """Codes [experts, out, in] uint8, and scales [experts, out, in / 32] float32. Raises: ConfigError."""
        experts, out, inputs = stored.shape
        name, part = stored.name, stored.part
        assert part is None or part.dim == 0
        if inputs % MXFP4_GROUP:
            raise self._error(name, f"{inputs} inputs do not divide into groups of {MXFP4_GROUP}")
        groups = inputs // MXFP4_GROUP
        packed = self._bytes(name + BLOCKS, (experts, out, groups, MXFP4_GROUP // 2), part)
        exponents = self._bytes(name + SCALES, (experts, out, groups), part)
        if bool((exponents == _NO_NUMBER).any()):
            raise self._error(name, f"{name}{SCALES} holds scales that are not numbers")
        return torch.stack((packed & 15, packed >> 4), -1).flatten(-3), powers_of_two(exponents)

    def linear(self, stacked: Sequence[StoredTensor], bias: Tensor | None, target: LinearTarget) -> NativeLinear | None:
        """The layer of one expert, on 4 bits for each weight; None without the native kernels."""
        if not isinstance(target.kernels, NativeKernels):
            return None
        codes: list[Tensor] = []
        scales: list[Tensor] = []
        for stored in stacked:
            place = stored.place
            assert place is not None
            whole = StoredTensor(stored.name, (place.experts, place.outputs, stored.shape[1]), place.part)
            rows = slice(place.rows.start, place.rows.stop, place.rows.step)
            for found, all_rows in zip((codes, scales), self.codes(whole), strict=True):
                found.append(all_rows[0, rows])
        packed = pack_fp4(torch.cat(codes), torch.cat(scales), is_paired=target.is_paired)
        return NativeLinear(target.kernels.native, packed, bias)

    def _bytes(self, name: str, shape: tuple[int, ...], part: Part | None) -> Tensor:
        found = self._tensors.read(name, shape, part)
        if found.dtype != torch.uint8:
            raise self._error(name.removesuffix(SCALES) + BLOCKS, f"tensor {name} is {found.dtype}, not torch.uint8")
        return found.to(self._device)

    def _error(self, name: str, message: str) -> ConfigError:
        return ConfigError(f"{self._tensors.file_of(name.removesuffix(BLOCKS) + BLOCKS)}: {message}")
