"""Has the kernel provide the pages of a KV cache before a request needs them. For KV in main memory."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

LOOK_S = 0.2
_MAX_BUSY = 0.3
"""Share of the cores that other processes may use. With half, a process that waits for one of two cores would be missed."""


class SpareCores:
    """Decides by the processor time that other processes used in the last `LOOK_S`."""

    def __init__(self, read: Callable[[], tuple[float, float]] | None = None) -> None:
        """`read` returns seconds of all cores since a fixed moment: those spent on other processes, and all that passed."""
        self._read = read or _core_times
        self._before = self._read()
        self._look_at_s = time.monotonic() + LOOK_S
        self._are_there = True

    def are_there(self) -> bool:
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            before, self._before = self._before, self._read()
            others_s, all_s = (now - then for now, then in zip(self._before, before, strict=True))
            self._are_there = others_s <= _MAX_BUSY * all_s
        return self._are_there


def _core_times() -> tuple[float, float]:
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0.0, 0.0
    all_s = sum(ticks) / os.sysconf("SC_CLK_TCK")
    idle_s = (ticks[3] + ticks[4]) / os.sysconf("SC_CLK_TCK")
    return all_s - idle_s - time.process_time(), all_s


_SLICE_BYTES = 2 * 2**20
"""Size of a huge page. It takes 0.1 ms, or 6 ms on a virtual machine whose host must find the memory first."""
_AHEAD_BYTES = 2 * _SLICE_BYTES
"""How far in each plane the pages are provided ahead of the blocks in use."""
_REST_S = 0.003
"""Pause of the thread after each 2 MB: without it, it would hold up a step."""
_BUSY_S = 1.0
"""Pause between looks for idle cores while other processes use them: each look wakes the engine's thread on a busy core."""
_MADV_POPULATE_WRITE = 23
_LIBC = ctypes.CDLL(None, use_errno=True)


class PageSupply:
    """The pages of private memory that are still to be provided: those of each plane's first blocks before those of later
    blocks. What the memory holds does not change.

    `use_idle_time` provides pages while the cores are idle; `reach` has a thread catch up with the blocks that steps write
    to, because a step that moves on to new pages in all planes at once would wait for each. All other pages come with the
    first write to them, and so do all pages where the kernel cannot provide them in advance (before Linux 5.14).
    """

    def __init__(self, address: int, planes: Sequence[tuple[int, int]], num_blocks: int, limit_bytes: float) -> None:
        """`planes`: (offset from `address`, size) of each in bytes, of `num_blocks` blocks. Provides at most `limit_bytes`."""
        self.supplied_bytes = 0
        self._limit_bytes = limit_bytes
        self._largest = max((size for _, size in planes), default=0)
        self._num_blocks = num_blocks
        self._slices = [
            (done, address + offset + done, address + offset + min(done + _SLICE_BYTES, size))
            for done in range(0, self._largest, _SLICE_BYTES)
            for offset, size in planes
            if done < size
        ]
        self._next = 0 if sys.platform.startswith("linux") else len(self._slices)
        self._lock = threading.Lock()
        self._goal_bytes = 0
        self._is_catching_up = False
        self._spare_cores = SpareCores()

    def use_idle_time(self) -> float | None:
        """`advance`, unless other processes use the cores. Returns the seconds until it may be called again, None: never."""
        if self._next == len(self._slices):
            return None
        if self._spare_cores.are_there():
            return 0.0 if self.advance() else None
        return _BUSY_S

    def advance(self) -> bool:
        """Provide the next 2 MB. Returns whether that was done, so that it may be called again. Releases the GIL."""
        with self._lock:
            if self._next == len(self._slices):
                return False
            _, start, end = self._slices[self._next]
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            if self.supplied_bytes + end - first > self._limit_bytes:
                self._next = len(self._slices)
            elif _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_POPULATE_WRITE) != 0:
                log.info("pages for KV come with the first write: %s", os.strerror(ctypes.get_errno()))
                self._next = len(self._slices)
            else:
                self._next += 1
                self.supplied_bytes += end - first
                return True
            return False

    def reach(self, block: int) -> None:
        """Have the pages of the next blocks after `block`, which is about to be written to, provided by a thread.

        Block 0 alone asks for none: a node writes to it when it starts, which would take longer beside that thread.
        """
        if not block or self._next == len(self._slices):
            return
        goal_bytes = self._largest * (block + 1) // self._num_blocks + _AHEAD_BYTES
        if goal_bytes > self._slices[self._next][0] and goal_bytes > self._goal_bytes:
            self._goal_bytes = goal_bytes
            if not self._is_catching_up:
                self._is_catching_up = True
                threading.Thread(target=self._catch_up, name="kv-pages", daemon=True).start()

    def _catch_up(self) -> None:
        while self._next < len(self._slices) and self._slices[self._next][0] < self._goal_bytes:
            self.advance()
            time.sleep(_REST_S)
        self._is_catching_up = False  # a goal set at this moment is reached with the next one
