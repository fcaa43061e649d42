"""Has the kernel provide the pages of a KV cache before a node serves. For KV in main memory."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import time
from collections.abc import Sequence

log = logging.getLogger(__name__)

_SLICE_BYTES = 2 * 2**20
"""Size of a huge page."""
_MADV_POPULATE_WRITE = 23


def supply_pages(address: int, planes: Sequence[tuple[int, int]], limit_s: float, limit_bytes: float) -> int:
    """Provide the pages of private memory at `address`, without a change to what they hold: those of the first blocks of all
    planes first, for `limit_s` seconds and about `limit_bytes` at most. Returns the number of bytes provided.

    `planes`: (offset, size) of each in bytes. Pages that are not provided come with the first write to them; so do all
    where the kernel cannot provide them (before Linux 5.14).
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    ends_s = time.perf_counter() + limit_s
    supplied = 0
    for done in range(0, max(size for _, size in planes), _SLICE_BYTES):
        for offset, size in planes:
            first = (address + offset + done) // mmap.PAGESIZE * mmap.PAGESIZE
            length = address + offset + min(done + _SLICE_BYTES, size) - first
            if done >= size:
                continue
            if supplied + length > limit_bytes or time.perf_counter() > ends_s:
                return supplied
            if madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
                log.info("pages for KV come with the first write: %s", os.strerror(ctypes.get_errno()))
                return supplied
            supplied += length
    return supplied
