"""Figures of a run while it runs."""

from __future__ import annotations

from kvrelay.load.live import LiveFigures
from kvrelay.load.outcome import RequestOutcome


def test_figures_cover_the_last_requests_and_all_errors() -> None:
    figures = LiveFigures()
    assert figures.describe() == ""
    figures.take(RequestOutcome(0, 0.0, error="timeout"))
    for number in range(1100):
        ttft_s = 9.0 if number < 100 else 0.1
        figures.take(RequestOutcome(number, 0.0, ended_s=ttft_s + 0.9, ttft_s=ttft_s, output_tokens=10))
    assert figures.describe() == "TTFT p50 100.0 p99 100.0 ms, TPOT p50 100.0 p99 100.0 ms, 1 errors"
