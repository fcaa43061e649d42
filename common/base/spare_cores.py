"""Measures whether the machine's cores have time for work that can wait (Linux; elsewhere the answer is always yes)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

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
