"""The clock that pure cores take as an argument, so that tests can pass one that they control."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Monotonic seconds; only differences are meaningful."""

monotonic: Clock = time.monotonic


_EARLY_S = 0.002
"""uvloop counts in milliseconds, and may end a sleep one millisecond early."""


def until_next(period_s: float, now_s: float) -> float:
    """Seconds until the clock shows a multiple of `period_s`; a multiple less than `_EARLY_S` away counts as reached.

    All periodic work of a process, and of a host, waits for this, so it runs at the same moments and causes fewer wake-ups.
    Hosts differ, because a monotonic clock starts when its host does.
    """
    left_s = period_s - now_s % period_s
    return left_s if left_s > _EARLY_S else left_s + period_s
