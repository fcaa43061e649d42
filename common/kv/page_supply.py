"""Has the kernel provide the pages of a KV cache before a node serves. For KV in main memory."""

from __future__ import annotations

import logging
import mmap
import sys
import time
from collections.abc import Sequence

log = logging.getLogger(__name__)

_SLICE_BYTES = 2 * 2**20
"""Size of a huge page."""
_MADV_POPULATE_WRITE = 23


def supply_pages(memory: mmap.mmap, planes: Sequence[tuple[int, int]], limit_s: float, limit_bytes: float) -> int:
    """Provide pages of private memory without changing what they hold: the pages of each plane's first blocks before those
    of later blocks, for at most `limit_s` seconds and at most `limit_bytes`. Returns the number of bytes provided.

    `planes`: (offset, size) of each in bytes. All other pages come with the first write to them, and so do all pages where
    the kernel cannot provide them in advance (before Linux 5.14).
    """
    if not sys.platform.startswith("linux"):
        return 0
    slices = [
        (offset + done, offset + min(done + _SLICE_BYTES, size))
        for done in range(0, max(size for _, size in planes), _SLICE_BYTES)
        for offset, size in planes
        if done < size
    ]
    ends_s, supplied = time.perf_counter() + limit_s, 0
    for start, end in slices:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if supplied + end - first > limit_bytes or time.perf_counter() > ends_s:
            break
        try:
            memory.madvise(_MADV_POPULATE_WRITE, first, end - first)
        except OSError as error:
            log.info("pages for KV come with the first write: %s", error.strerror)
            break
        supplied += end - first
    return supplied
