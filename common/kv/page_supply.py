"""Has the kernel provide the pages of a KV cache before a request needs them. For KV in main memory."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Sequence

log = logging.getLogger(__name__)

_SLICE_BYTES = 2 * 2**20
"""Size of a huge page. It takes 0.1 ms, or 6 ms on a virtual machine whose host must find the memory first."""
_MADV_POPULATE_WRITE = 23
_LIBC = ctypes.CDLL(None, use_errno=True)


class PageSupply:
    """The pages of private memory that are still to be provided: those of each plane's first blocks before those of later
    blocks. What the memory holds does not change.

    All other pages come with the first write to them, and so do all pages where the kernel cannot provide them in advance
    (before Linux 5.14).
    """

    def __init__(self, address: int, planes: Sequence[tuple[int, int]], limit_bytes: float) -> None:
        """`planes`: (offset from `address`, size) of each in bytes. Provides at most `limit_bytes`."""
        self.supplied_bytes = 0
        self._limit_bytes = limit_bytes
        self._slices = iter(
            [
                (address + offset + done, address + offset + min(done + _SLICE_BYTES, size))
                for done in range(0, max((size for _, size in planes), default=0), _SLICE_BYTES)
                for offset, size in planes
                if done < size
            ]
            if sys.platform.startswith("linux")
            else []
        )

    def advance(self) -> bool:
        """Provide the next 2 MB. Returns whether that was done, so that it may be called again. Releases the GIL."""
        start, end = next(self._slices, (0, 0))
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if start == end or self.supplied_bytes + end - first > self._limit_bytes:
            return False
        if _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_POPULATE_WRITE) != 0:
            log.info("pages for KV come with the first write: %s", os.strerror(ctypes.get_errno()))
            self._slices = iter([])
            return False
        self.supplied_bytes += end - first
        return True
