"""How long something took, less what the machine itself stood still: one that stalls for seconds is no fault of ours."""

from __future__ import annotations

import threading
import time

_TICK_S = 0.02
_LATE_S = 0.1
"""A thread that wakes so much later than it wanted has seen a stall."""


class SteadyTime:
    """Seconds since the block began, in `passed_s`; a thread beside it notices stalls."""

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
        """So far; of a stall that is not over yet, it knows nothing."""
        time.sleep(2 * _TICK_S)  # one that is just over has been noticed then
        return time.monotonic() - self._start_s - self._stalled_s - 2 * _TICK_S
