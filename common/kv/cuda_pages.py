"""Python interface of `pages.cu`: GPU memory that other processes can map, and copies of KV blocks.

Callable from any thread. nvcc compiles the library when it is first needed (seconds, once per user and machine), or
ahead of time into a folder to be put on PYTHONPATH, as `scripts/gpu-build` does for all kernels:

    python -m common.kv.cuda_pages FOLDER
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("pages.cu")
_ARCHITECTURES = (
    "compute_75,code=sm_75",
    "compute_80,code=sm_80",
    "compute_90,code=sm_90",
    "compute_90,code=compute_90",
)
"""Starts with the oldest GPUs that CUDA 13 supports; each also runs on later GPUs of its generation. The last entry is
PTX for newer GPUs, whose driver compiles it."""
_COMPILE_S = 300.0
_FOLDER = "kvrelay_kernels"


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
    """The compiled `pages.cu`. Raises: OSError if it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        self._calls: Any = ctypes.CDLL(str(path))
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
        return CudaLibrary(_compiled())
    # RuntimeError: the user has no home directory.
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


def _compiled() -> Path:
    """Raises: OSError or SubprocessError."""
    built_ahead = (Path(entry) / _FOLDER / _name() for entry in sys.path)
    target = next((path for path in built_ahead if path.exists()), Path.home() / ".cache" / _FOLDER / _name())
    if not target.exists():
        compile_pages(target)
    return target


def _name() -> str:
    digest = hashlib.sha256(_SOURCE.read_bytes() + "".join(_ARCHITECTURES).encode()).hexdigest()
    return f"pages-{digest[:16]}.so"


def compile_pages(target: Path) -> None:
    """Compile `pages.cu` into the shared library `target`. Raises: OSError without nvcc, SubprocessError."""
    home = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which(str(home / "bin" / "nvcc"))
    if nvcc is None:
        raise FileNotFoundError("pages.cu is not compiled yet, and there is no nvcc; set CUDA_HOME")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be compiling too: the last one replaces an identical file.
    unfinished = target.with_suffix(f".{os.getpid()}")
    architectures = [word for arch in _ARCHITECTURES for word in ("-gencode", f"arch={arch}")]
    command = [nvcc, "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", *architectures, "-o", str(unfinished)]
    try:
        done = subprocess.run([*command, str(_SOURCE)], capture_output=True, text=True, timeout=_COMPILE_S, check=False)
        if done.returncode:
            raise OSError(f"nvcc failed: {(done.stderr or done.stdout).strip()[-2000:]}")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def main() -> None:
    """Compile into the folder given on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m common.kv.cuda_pages FOLDER")
    target = Path(sys.argv[1]) / _FOLDER / _name()
    try:
        compile_pages(target)
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(str(error))
    print(target)


if __name__ == "__main__":
    main()
