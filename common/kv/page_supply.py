"""Has the kernel provide the pages of a KV cache before requests write to them. For nodes whose KV lies in main memory."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time

log = logging.getLogger(__name__)

_SLICE_BYTES = 2 * 2**20
"""A huge page: other threads that map memory wait for one slice at most."""
_RESTS = 4.0
"""After each slice it rests this many times as long as the slice took: a node that starts to serve keeps its cores."""
_MADV_POPULATE_WRITE = 23


def supply_pages(address: int, size_bytes: int) -> threading.Thread | None:
    """Provide the pages of private memory at `address`, a multiple of the page size, on a thread of its own, without a
    change to what they hold. Returns the thread; None where the system cannot do that.

    The first write to a fresh page waits until the kernel has cleared it, and on virtual machines until the host has found
    memory for it: a decode step that enters sixteen fresh huge pages takes 50 ms longer then. Where that fails midway, for
    want of memory or before Linux 5.14, pages come with the first write.
    """
    if not sys.platform.startswith("linux"):
        return None
    thread = threading.Thread(target=_supply, args=(address, size_bytes), name="kv-pages", daemon=True)
    thread.start()
    return thread


def _supply(address: int, size_bytes: int) -> None:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    started_s = time.perf_counter()
    for offset in range(0, size_bytes, _SLICE_BYTES):
        began_s = time.perf_counter()
        length = min(_SLICE_BYTES, size_bytes - offset)
        if madvise(ctypes.c_void_p(address + offset), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
            log.info("pages for KV come with the first write: %s", os.strerror(ctypes.get_errno()))
            return
        time.sleep(_RESTS * (time.perf_counter() - began_s))
    log.debug("the pages of %.2f GB of KV are there after %.1f s", size_bytes / 1e9, time.perf_counter() - started_s)
