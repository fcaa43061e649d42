"""The search for the highest rate inside the objectives: doubling, then bisection. Pure."""

from __future__ import annotations

import math


def _halvings(ratio: float) -> int:
    """How often `ratio` must be halved to be 1 at most."""
    return max(0, math.ceil(math.log2(ratio) - 1e-9)) if ratio > 0 else 0


class RateSearch:
    """Proposes rates; the caller reports for each whether the objectives were met.

    The rate is doubled from `first` until it misses them (or halved until it meets them), then the gap between the
    highest that met and the lowest that missed is halved, geometrically, until their ratio is at most 1 + `precision`.
    """

    def __init__(self, first: float, precision: float, *, lowest: float, highest: float) -> None:
        self.next_rate: float | None = min(first, highest)
        """The rate to try now; None: the search has ended."""
        self._precision = precision
        self._lowest, self._highest = lowest, highest
        self.best = 0.0
        """The highest rate that met the objectives; 0: none did."""
        self.worst = math.inf
        """The lowest rate that missed them; infinity: none did."""

    def left(self) -> tuple[int, int]:
        """How many rates are still to be tried, at least and at most."""
        if self.next_rate is None:
            return 0, 0
        if self.best and self.worst < math.inf:
            left = self._bisections(self.worst / self.best)
            return left, left
        within = self._bisections(2.0)
        up = 1 + _halvings(self._highest / self.next_rate) if self.worst == math.inf else 0
        down = 1 + _halvings(self.next_rate / self._lowest) if not self.best else 0
        # The first rate alone cannot have a limit on both sides; a bound may be reached before there is one.
        least = (1 if self.best or self.worst < math.inf else 2) + within
        return min(least, *(each for each in (up, down) if each)), max(up, down) + within

    def _bisections(self, ratio: float) -> int:
        """Bisections after which two rates of this ratio are as near as the precision asks for."""
        return _halvings(math.log(ratio) / math.log(1 + self._precision)) if ratio > 1 else 0

    def record(self, *, met: bool) -> None:
        """Take the result at `next_rate`."""
        assert self.next_rate is not None
        if met:
            self.best = max(self.best, self.next_rate)
        else:
            self.worst = min(self.worst, self.next_rate)
        self.next_rate = self._propose()

    def _propose(self) -> float | None:
        if self.worst == math.inf:
            return None if self.best >= self._highest else min(2 * self.best, self._highest)
        if not self.best:
            return None if self.worst <= self._lowest else max(self.worst / 2, self._lowest)
        if self.worst <= self.best * (1 + self._precision):  # also where a lower rate missed by chance
            return None
        return math.sqrt(self.best * self.worst)
