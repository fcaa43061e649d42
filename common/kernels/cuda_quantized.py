"""Python interface of `quantized.cu`: operations of linear layers on quantized weights, on a GPU.

Called on a rank's main thread while it loads and on its engine thread, on the current stream. All tensors are of one GPU;
weights and scales are contiguous; activations are bfloat16, float16 or float32, and may be any view.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from ctypes import c_char_p, c_int, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from common.kernels.cuda_source import QUANTIZED, load_library
from common.kernels.float8 import E4M3

log = logging.getLogger(__name__)

_ALIGNED_BYTES = 16
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_MIN_CAPABILITY = (8, 0)
BLOCK = 128
"""Values of a row that share a scale if rows are quantized in blocks."""
_MOST_ROWS = 64
_TILE = 128
"""Inputs of a tile of codes."""
_GROUPS_OF_TILES = (32, 64)
_OFFSET = 8
_IN_WORD = (0, 2, 4, 6, 1, 3, 5, 7)
"""Numbers of the inputs in a word of eight codes, from its lowest bits on."""


@dataclass(frozen=True)
class Int4Weight:
    """A matrix of 4 bit codes in the order of the kernels: weight = (code - 8) * scale + shift."""

    words: Tensor
    """[out, in / 8] int32, eight codes each, those of even inputs in the lower half."""
    factors: Tensor
    """[out, in / group, 2], scale and shift, of the dtype of activations."""
    is_tiled: bool
    """Whether the words of 128 inputs are in the order in which `multiply` loads them: word 4 * i + j of 16 has the inputs
    from 8 * i + 32 * j on."""

    @staticmethod
    def pack(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Int4Weight:
        """Pack scale * (code - zero). codes: [out, in] uint8, in and the group multiples of 8; scale, zero:
        [out, in / group] float32; dtype: of activations."""
        num_out, num_in = codes.shape
        group = num_in // scale.size(1)
        is_tiled = num_in % _TILE == 0 and (group % _TILE == 0 or group in _GROUPS_OF_TILES)
        eights = codes.view(num_out, -1, 4, 4, 8).transpose(2, 3) if is_tiled else codes
        eights = eights.reshape(num_out, num_in // 8, 8)
        words = torch.zeros(eights.shape[:2], dtype=torch.int32, device=codes.device)
        for place, index in enumerate(_IN_WORD):
            words |= eights[..., index].int() << 4 * place
        rounded = scale.to(dtype)
        factors = torch.stack((rounded, ((_OFFSET - zero) * rounded.float()).to(dtype)), 2)
        return Int4Weight(words, factors, is_tiled)

    @property
    def num_out(self) -> int:
        return self.words.size(0)

    @property
    def num_in(self) -> int:
        return 8 * self.words.size(1)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.num_in // self.factors.size(1)

    def can_multiply(self, num_rows: int) -> bool:
        """Whether a kernel multiplies `num_rows` rows without dequantizing the weights."""
        return self.is_tiled and num_rows <= _MOST_ROWS and self.factors.dtype != torch.float32


class QuantizedKernels:
    """The compiled `quantized.cu`. Its methods raise torch.AcceleratorError as PyTorch's operations do."""

    def __init__(self) -> None:
        """Raises: as `load_library`."""
        self._calls = load_library(QUANTIZED)
        self._calls.kvq_error.restype = c_char_p
        pointer, number = c_void_p, c_int
        self._calls.kvq_multiply.argtypes = [number, pointer, number, *[pointer] * 5, *[number] * 4]
        self._calls.kvq_dequantize.argtypes = [number, pointer, number, *[pointer] * 3, *[number] * 4]
        self._calls.kvq_quantize.argtypes = [number, pointer, number, pointer, pointer, number, pointer, *[number] * 5]
        self._calls.kvq_scale.argtypes = [number, pointer, number, pointer, number, *[pointer] * 4, *[number] * 3]

    def multiply(self, x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
        """y = x W^T + bias, if `weight.can_multiply` T rows. x: [T, in] and bias: [out], of the dtype of its factors."""
        assert x.dtype == weight.factors.dtype
        x = _aligned(x)
        y = torch.empty(x.size(0), weight.num_out, dtype=x.dtype, device=x.device)
        given = x.data_ptr(), weight.words.data_ptr(), weight.factors.data_ptr(), _address(bias), y.data_ptr()
        sizes = x.size(0), weight.num_in, weight.num_out, weight.group
        self._check(self._calls.kvq_multiply(*_launch_target(x), *given, *sizes))
        return y

    def dequantize(self, weight: Int4Weight) -> Tensor:
        """[out, in], of the dtype of its factors."""
        factors = weight.factors
        wide = torch.empty(weight.num_out, weight.num_in, dtype=factors.dtype, device=factors.device)
        given = weight.words.data_ptr(), factors.data_ptr(), wide.data_ptr()
        sizes = weight.num_out, weight.num_in, weight.group, weight.is_tiled
        self._check(self._calls.kvq_dequantize(*_launch_target(wide), *given, *sizes))
        return wide

    def quantize_int8(self, x: Tensor, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Round each row to 255 steps. x: [T, in]. Returns [num_rows, width] int8, zeros where x has nothing, and [T] float32 scales."""
        scale = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
        return self._quantize(x, torch.int8, num_rows, width, scale), scale

    def quantize_e4m3(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Round each row. x: [T, in]. Returns [T, in] e4m3 and [T] float32 scales."""
        scale = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
        return self._quantize(x, E4M3, x.size(0), x.size(1), scale), scale

    def quantize_e4m3_blocks(self, x: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Round each row in blocks of 128. x: [T, in]. Returns [num_rows, in] e4m3, zeros where x has no row, and
        [num_rows, in / 128] float32 scales, column after column."""
        scale = torch.empty(x.size(1) // BLOCK, num_rows, dtype=torch.float32, device=x.device)
        return self._quantize(x, E4M3, num_rows, x.size(1), scale), scale.t()

    def _quantize(self, x: Tensor, to: torch.dtype, num_rows: int, width: int, scale: Tensor) -> Tensor:
        """[num_rows, width] of `to`. Writes `scale`, which has two axes for blocks."""
        x = _aligned(x)
        codes = torch.empty(num_rows, width, dtype=to, device=x.device)
        made = codes.data_ptr(), to == torch.int8, scale.data_ptr()
        sizes = x.size(0), num_rows, x.size(1), width, scale.dim() == 2
        self._check(self._calls.kvq_quantize(*_launch_target(x), x.data_ptr(), *made, *sizes))
        return codes

    def scale(
        self, sums: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """`sums` times both scales, plus `bias`. sums: [at least T, at least out] int32 or float32; row_scale: [T] and
        column_scale, bias: [out], float32. Returns [T, out] of `dtype`."""
        num_rows, num_out = row_scale.numel(), column_scale.numel()
        y = torch.empty(num_rows, num_out, dtype=dtype, device=sums.device)
        given = sums.data_ptr(), sums.dtype == torch.int32, row_scale.data_ptr(), column_scale.data_ptr()
        sizes = num_rows, sums.size(1), num_out
        self._check(self._calls.kvq_scale(*_launch_target(y), *given, _address(bias), y.data_ptr(), *sizes))
        return y

    def _check(self, code: int) -> None:
        if code > 0:
            raise torch.AcceleratorError(f"CUDA error: {self._calls.kvq_error().decode()}")
        if code:
            raise ValueError(self._calls.kvq_error().decode())


def _aligned(x: Tensor) -> Tensor:
    """`x` contiguous, and aligned for a kernel's vectors."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNED_BYTES else x


def _launch_target(activations: Tensor) -> tuple[int, int, int]:
    """GPU, stream and type."""
    device = activations.device
    return device.index or 0, torch.cuda.current_stream(device).cuda_stream, _TYPES[activations.dtype]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def find_quantized_kernels(device: torch.device) -> QuantizedKernels | None:
    """The library for `device`; None on a CPU, and if it cannot be used, which is logged once."""
    if device.type != "cuda":
        return None
    try:
        if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
            raise OSError("they need compute capability 8.0")
        kernels = QuantizedKernels()
        _try(kernels, device)
        return kernels
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("quantized weights are multiplied by PyTorch's operations, which is slower: %s", error)
        return None


def _try(kernels: QuantizedKernels, device: torch.device) -> None:
    """Run two of them: the driver may be too old for the library, or the library not for this GPU. Raises: RuntimeError."""
    x = torch.ones(1, _TILE, dtype=torch.bfloat16, device=device)
    one = torch.ones(1, 1, device=device)
    codes, _ = kernels.quantize_int8(x, 1, _TILE)
    weight = Int4Weight.pack(torch.full((1, _TILE), 9, dtype=torch.uint8, device=device), one, 8 * one, x.dtype)
    y = kernels.multiply(x, weight, None)
    if float(y) != _TILE or not bool((codes == 127).all()):
        raise RuntimeError("they compute wrong results here")
