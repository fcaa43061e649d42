"""Measures how long something took, without the time in which the whole machine stalled."""

from __future__ import annotations

import threading
import time

_TICK_S = 0.02
_LATE_S = 0.1
"""A thread that wakes this much too late has detected a stall."""


class SteadyTime:
    """Seconds since the block began, in `passed_s`; a background thread detects stalls."""

    def __enter__(self) -> SteadyTime:
        self._start_s = time.monotonic()
        self._stalled_s = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="steady-time", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._done.wait(_TICK_S):
            now_s = time.monotonic()
            late_s = now_s - before_s - _TICK_S
            self._stalled_s += late_s if late_s > _LATE_S else 0.0
            before_s = now_s

    @property
    def passed_s(self) -> float:
        """Time so far; a stall that has not ended yet is not subtracted."""
        time.sleep(2 * _TICK_S)  # by then a stall that has just ended is detected
        return time.monotonic() - self._start_s - self._stalled_s - 2 * _TICK_S
