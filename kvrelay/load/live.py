"""The current figures of a run, while it runs. Pure."""

from __future__ import annotations

from collections import deque

from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.summary import percentile

_WINDOW = 1000
"""Number of last requests that the figures cover."""


class LiveFigures:
    """Percentiles of the last requests, and the number of errors so far."""

    def __init__(self) -> None:
        self._last: deque[RequestOutcome] = deque(maxlen=_WINDOW)
        self._errors = 0

    def take(self, outcome: RequestOutcome) -> None:
        """Count one more outcome."""
        if outcome.error:
            self._errors += 1
        else:
            self._last.append(outcome)

    def describe(self) -> str:
        """The figures in a few words."""
        last = list(self._last)
        ttft = sorted(outcome.ttft_s for outcome in last if outcome.ttft_s is not None)
        tpot = sorted(outcome.tpot_s for outcome in last if outcome.tpot_s is not None)
        parts = [f"{name} {_pair(values)}" for name, values in (("TTFT", ttft), ("TPOT", tpot)) if values]
        if self._errors:
            parts.append(f"{self._errors} errors")
        return ", ".join(parts)


def _pair(ordered: list[float]) -> str:
    median, high = (1000 * percentile(ordered, percent) for percent in (50, 99))
    return f"p50 {median:.1f} p99 {high:.1f} ms"
