"""What steps take by their number of rows, as measured on this node. Engine thread; pure."""

from __future__ import annotations

from bisect import bisect_left, insort

_GAIN = 0.15
_MOST = 3.0
"""A step that takes longer than this multiple of what is expected was disturbed: it counts as that."""
_PER_ROW = 0.04
"""Assumed price of a further row, as a share of a step, where nothing is measured."""
_FORGET = 2000
"""The measurement for a number of rows is forgotten when the last `_FORGET` steps had none of that size: the machine may have
changed."""


class StepCosts:
    """Mean seconds of recent steps without prompts."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._seen_at: dict[int, int] = {}
        self._rows: list[int] = []
        """The keys, in order."""
        self._steps = 0

    @property
    def is_measured(self) -> bool:
        """Whether `seconds` are seconds; else they are only ratios."""
        return bool(self._rows)

    def record(self, rows: int, seconds: float) -> None:
        """Take in the duration of one step with `rows` rows."""
        self._steps += 1
        mean = self._seconds.get(rows)
        if mean is None:
            insort(self._rows, rows)
            self._seconds[rows] = seconds
        else:
            self._seconds[rows] = mean + _GAIN * (min(seconds, _MOST * mean) - mean)
        self._seen_at[rows] = self._steps
        if self._steps % _FORGET == 0:
            for old in [each for each, at in self._seen_at.items() if self._steps - at > _FORGET]:
                del self._seconds[old], self._seen_at[old]
                self._rows.remove(old)

    def seconds(self, rows: int) -> float:
        """The expected time of a step. Between measured numbers of rows it is interpolated, and it never falls with more
        rows. Before the first measurement only ratios mean something."""
        if not self._rows:
            return 1.0 + _PER_ROW * rows
        at = bisect_left(self._rows, rows)
        if at == len(self._rows):
            last = self._rows[-1]
            return self._seconds[last] * (1 + _PER_ROW * (rows - last))
        above = self._rows[at]
        if above == rows or at == 0:
            return self._seconds[above]
        below = self._rows[at - 1]
        low, high = self._seconds[below], self._seconds[above]
        return low + max(0.0, high - low) * (rows - below) / (above - below)
