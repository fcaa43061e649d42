"""Time as an argument: pure cores take a `Clock`, tests pass one that they control."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Monotonic seconds; only differences are meaningful."""

monotonic: Clock = time.monotonic


_EARLY_S = 0.002
"""uvloop counts in milliseconds, and may end a pause one early."""


def until_next(period_s: float, now_s: float) -> float:
    """Seconds until the clock shows a multiple of `period_s`; one that is less than `_EARLY_S` away counts as reached.

    Periodic work waits for this: all of it in a process, and on a host, is then done at the same moments, with fewer wake-ups.
    Hosts differ, because a monotonic clock begins with the host.
    """
    left_s = period_s - now_s % period_s
    return left_s if left_s > _EARLY_S else left_s + period_s
