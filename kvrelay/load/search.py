"""The search for the highest rate inside the objectives: doubling, then bisection. Pure."""

from __future__ import annotations

import math


class RateSearch:
    """Proposes rates; the caller reports for each whether the objectives were met.

    The rate is doubled from `first` until it misses them (or halved until it meets them), then the gap between the
    highest that met and the lowest that missed is halved, geometrically, until their ratio is at most 1 + `precision`.
    """

    def __init__(self, first: float, precision: float, *, lowest: float, highest: float) -> None:
        self._next: float | None = min(first, highest)
        self._precision = precision
        self._lowest, self._highest = lowest, highest
        self.best = 0.0
        """The highest rate that met the objectives; 0: none did."""
        self.worst = math.inf
        """The lowest rate that missed them; infinity: none did."""

    @property
    def next_rate(self) -> float | None:
        """The rate to try now; None: the search has ended."""
        return self._next

    def record(self, *, met: bool) -> None:
        """Take the result at `next_rate`."""
        assert self._next is not None
        if met:
            self.best = max(self.best, self._next)
        else:
            self.worst = min(self.worst, self._next)
        self._next = self._propose()

    def _propose(self) -> float | None:
        if self.worst == math.inf:
            return None if self.best >= self._highest else min(2 * self.best, self._highest)
        if not self.best:
            return None if self.worst <= self._lowest else max(self.worst / 2, self._lowest)
        if self.worst <= self.best * (1 + self._precision):  # also where a lower rate missed by chance
            return None
        return math.sqrt(self.best * self.worst)
