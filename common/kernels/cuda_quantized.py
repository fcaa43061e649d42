"""Python interface of `quantized.cu`: operations of linear layers on quantized weights, on a GPU.

Called on a rank's main thread while it loads and on its engine thread, on the current stream. Its arguments are contiguous
tensors of one GPU; activations are bfloat16, float16 or float32.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from ctypes import c_char_p, c_int, c_void_p

import torch
from torch import Tensor

from common.kernels.cuda_source import QUANTIZED, load_library
from common.kernels.float8 import E4M3

log = logging.getLogger(__name__)

_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_MIN_CAPABILITY = (8, 0)
BLOCK = 128
"""Values of a row that share a scale where rows are quantized in blocks."""
_MOST_ROWS = 64
_CHUNK, _GROUP = 128, 32


class CudaQuantized:
    """The compiled `quantized.cu`. Its methods raise OSError if the GPU refuses a launch."""

    def __init__(self) -> None:
        """Raises: as `load_library`."""
        self._calls = load_library(QUANTIZED)
        self._calls.kvq_error.restype = c_char_p
        pointer, number = c_void_p, c_int
        self._calls.kvq_multiply.argtypes = [
            number,
            pointer,
            number,
            pointer,
            pointer,
            number,
            *[pointer] * 4,
            *[number] * 4,
        ]
        self._calls.kvq_widen.argtypes = [number, pointer, number, pointer, number, *[pointer] * 3, *[number] * 3]
        self._calls.kvq_quantize.argtypes = [number, pointer, number, pointer, pointer, number, pointer, *[number] * 5]
        self._calls.kvq_scale.argtypes = [number, pointer, number, pointer, number, *[pointer] * 4, *[number] * 3]

    def multiplies(self, dtype: torch.dtype, num_rows: int, num_in: int, group: int) -> bool:
        """Whether `multiply` takes such a product."""
        return dtype != torch.float32 and num_rows <= _MOST_ROWS and not num_in % _CHUNK and not group % _GROUP

    def multiply(self, x: Tensor, codes: Tensor, bits: int, scale: Tensor, zero: Tensor, bias: Tensor | None) -> Tensor:
        """y = x W^T + bias, with W = scale * (code - zero) rounded to x's dtype.

        x: [T, in]; codes: [out, in / 2] uint8, the even inputs' in the lower halves, or [out, in] for 8 bits; scale, zero:
        [out, in / group] float32; bias: [out] of x's dtype. Returns [T, out] of x's dtype. Only if `multiplies`.
        """
        (num_rows, num_in), num_out = x.shape, codes.size(0)
        y = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
        weight = codes.data_ptr(), bits, scale.data_ptr(), zero.data_ptr()
        sizes = num_rows, num_in, num_out, num_in // scale.size(1)
        self._check(self._calls.kvq_multiply(*_place(x), x.data_ptr(), *weight, _address(bias), y.data_ptr(), *sizes))
        return y

    def widen(self, codes: Tensor, bits: int, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights of `multiply`, [out, in]; `in` and the group are multiples of 8."""
        num_out, num_in = codes.size(0), codes.size(1) * 8 // bits
        wide = torch.empty(num_out, num_in, dtype=dtype, device=codes.device)
        weight = codes.data_ptr(), bits, scale.data_ptr(), zero.data_ptr()
        sizes = num_out, num_in, num_in // scale.size(1)
        self._check(self._calls.kvq_widen(*_place(wide), *weight, wide.data_ptr(), *sizes))
        return wide

    def quantize_int8(self, x: Tensor, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Each row in 255 steps. x: [T, in]. Returns [num_rows, width] int8, zeros where x has nothing, and [T] float32 scales."""
        return self._quantize(x, torch.int8, num_rows, width)

    def quantize_e4m3(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each row. x: [T, in]. Returns [T, in] e4m3 and [T] float32 scales."""
        return self._quantize(x, E4M3, *x.shape)

    def _quantize(self, x: Tensor, to: torch.dtype, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
        codes = torch.empty(num_rows, width, dtype=to, device=x.device)
        scale = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
        made = codes.data_ptr(), to == torch.int8, scale.data_ptr()
        self._check(self._calls.kvq_quantize(*_place(x), x.data_ptr(), *made, x.size(0), num_rows, x.size(1), width, 0))
        return codes, scale

    def quantize_e4m3_blocks(self, x: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Each row in blocks of 128. x: [T, in]. Returns [num_rows, in] e4m3, zeros where x has no row, and
        [num_rows, in / 128] float32 scales, column after column."""
        num_in = x.size(1)
        codes = torch.empty(num_rows, num_in, dtype=E4M3, device=x.device)
        scale = torch.empty(num_in // BLOCK, num_rows, dtype=torch.float32, device=x.device)
        made = codes.data_ptr(), 0, scale.data_ptr()
        self._check(self._calls.kvq_quantize(*_place(x), x.data_ptr(), *made, x.size(0), num_rows, num_in, num_in, 1))
        return codes, scale.t()

    def scale(
        self, sums: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """`sums` times both scales, plus `bias`. sums: [at least T, at least out] int32 or float32; row_scale: [T] and
        column_scale: [out], float32; bias: [out] of `dtype`. Returns [T, out] of `dtype`."""
        num_rows, num_out = row_scale.numel(), column_scale.numel()
        y = torch.empty(num_rows, num_out, dtype=dtype, device=sums.device)
        given = sums.data_ptr(), sums.dtype == torch.int32, row_scale.data_ptr(), column_scale.data_ptr()
        sizes = num_rows, sums.size(1), num_out
        self._check(self._calls.kvq_scale(*_place(y), *given, _address(bias), y.data_ptr(), *sizes))
        return y

    def _check(self, code: int) -> None:
        if code:
            raise OSError(self._calls.kvq_error().decode())


def _place(activations: Tensor) -> tuple[int, int, int]:
    """GPU, stream and type."""
    device = activations.device
    return device.index or 0, torch.cuda.current_stream(device).cuda_stream, _TYPES[activations.dtype]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def find_quantized(device: torch.device) -> CudaQuantized | None:
    """The library for `device`; None on a CPU, and where it cannot be used, which is logged once."""
    if device.type != "cuda":
        return None
    try:
        if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
            raise OSError("it needs compute capability 8.0")
        return CudaQuantized()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("quantized weights are multiplied by PyTorch's operations, which is slower: %s", error)
        return None
