"""Python interface of `pages.cu`: GPU memory that other processes can map, and copies of KV blocks.

Callable from any thread.
"""

from __future__ import annotations

import functools
import logging
import os
import subprocess
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_void_p

import torch
from torch import Tensor

from common.kernels.cuda_source import PAGES, load_library

log = logging.getLogger(__name__)


class GpuMemory:
    """GPU memory mapped into this process. It is unmapped when this object is no longer referenced, and freed when no
    process maps it, even if the process that allocated it has died."""

    def __init__(self, library: CudaLibrary, address: int, mapped_bytes: int, size_bytes: int, fd: int = -1) -> None:
        self.address = address
        self._library = library
        self._mapped_bytes = mapped_bytes
        self._fd = fd
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }

    def tensor(self, device: torch.device) -> Tensor:
        """[size_bytes], uint8: this memory, which lives as long as the tensor."""
        # For any other device, including the CPU, PyTorch would copy the memory.
        seen = torch.as_tensor(self, device=torch.device("cuda", _index(device)))
        assert seen.data_ptr() == self.address, "PyTorch has copied the memory"
        return seen

    def export(self) -> int:
        """A file descriptor for another process; the caller closes it. Raises: OSError."""
        return os.dup(self._fd)

    def __del__(self) -> None:
        self._library.unmap(self.address, self._mapped_bytes)
        if self._fd >= 0:
            os.close(self._fd)


class CudaLibrary:
    """The compiled `pages.cu`. Raises: as `load_library`."""

    def __init__(self) -> None:
        self._calls = load_library(PAGES)
        self._calls.kv_error.restype = c_char_p
        place = [POINTER(c_void_p), POINTER(c_size_t)]
        self._calls.kv_allocate.argtypes = [c_int, c_size_t, *place, POINTER(c_int)]
        self._calls.kv_open.argtypes = [c_int, c_int, c_size_t, *place]
        self._calls.kv_unmap.argtypes = [c_void_p, c_size_t]
        side = [c_void_p, c_int64, c_int64, c_void_p]
        self._calls.kv_copy_runs.argtypes = [c_int, c_void_p, *side, *side, c_int64, c_int64, c_int64, c_int]

    def allocate(self, device: torch.device, size_bytes: int) -> GpuMemory:
        """Allocate memory that `GpuMemory.export` can share. Raises: OSError."""
        address, mapped, fd = c_void_p(), c_size_t(), c_int()
        self._check(self._calls.kv_allocate(_index(device), size_bytes, byref(address), byref(mapped), byref(fd)))
        return GpuMemory(self, address.value or 0, mapped.value, size_bytes, fd.value)

    def open(self, device: torch.device, fd: int, size_bytes: int) -> GpuMemory:
        """Map another process's memory so that `device` can read it. The caller still owns `fd`. Raises: OSError."""
        address, mapped = c_void_p(), c_size_t()
        self._check(self._calls.kv_open(_index(device), fd, size_bytes, byref(address), byref(mapped)))
        return GpuMemory(self, address.value or 0, mapped.value, size_bytes)

    def unmap(self, address: int, mapped_bytes: int) -> None:
        """End a mapping."""
        if self._calls.kv_unmap(address, mapped_bytes):
            log.warning("could not unmap GPU memory: %s", self._calls.kv_error().decode())

    def copy_runs(
        self,
        stream: torch.cuda.Stream,
        dst: tuple[int, int, int, int],
        src: tuple[int, int, int, int],
        planes: int,
        blocks: int,
        run_bytes: int,
        grid: int,
    ) -> None:
        """Start a copy on `stream`. `dst` and `src` are (address, plane bytes, block bytes, address of block ids or 0).

        Raises: OSError.
        """
        device, handle = _index(stream.device), stream.cuda_stream
        self._check(self._calls.kv_copy_runs(device, handle, *dst, *src, planes, blocks, run_bytes, grid))

    def _check(self, code: int) -> None:
        if code:
            raise OSError(self._calls.kv_error().decode())


@functools.cache
def cuda_library() -> CudaLibrary | None:
    """The library, compiled if necessary; None if that is impossible, which is logged once."""
    try:
        return CudaLibrary()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("KV is copied by PyTorch and cannot be shared between the processes of a GPU: %s", error)
        return None


def allocate_shareable(device: torch.device, size_bytes: int) -> GpuMemory | None:
    """Memory for KV that other processes can map; None if that is impossible, which is logged."""
    library = cuda_library()
    if library is None:
        return None
    try:
        return library.allocate(device, size_bytes)
    except OSError as error:
        log.warning("KV on %s cannot be shared between processes: %s", device, error)
        return None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
