"""The summary of a run: percentiles, rates, errors and goodput of its outcomes."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvrelay.load import show
from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.summary import LiveFigures, distribution, percentile, summarise


def test_percentiles_are_interpolated() -> None:
    assert percentile([1.0], 99) == 1.0
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 50) == 3.0
    assert percentile([0.0, 10.0], 90) == pytest.approx(9.0)
    assert distribution([]) is None


def outcome(number: int, *, ttft: float = 0.1, tpot: float = 0.01, error: str = "", cached: int = 0) -> RequestOutcome:
    made = RequestOutcome(number, sent_s=float(number), error=error, detail=f"{error} detail" if error else "")
    made.ttft_s, made.output_tokens = ttft, 11
    made.ended_s = made.sent_s + ttft + 10 * tpot
    made.itl_s = [tpot] * 10
    made.prompt_tokens, made.cached_tokens, made.prefill = 100, cached, "local"
    return made


def test_summary_counts_rates_hits_errors_and_goodput() -> None:
    outcomes = [
        outcome(0),
        outcome(1, ttft=3.0),
        outcome(2, tpot=0.2),
        outcome(3, cached=60),
        outcome(4, error="timeout"),
    ]
    summary = summarise(outcomes, slo_ttft_s=1.0, slo_tpot_s=0.1)
    assert (summary["requests"], summary["succeeded"], summary["errors"]) == (5, 4, {"timeout": 1})
    assert summary["error_rate"] == pytest.approx(0.2)
    assert summary["first_errors"] == ["timeout detail"]
    assert summary["hit_rate"] == pytest.approx(60 / 400)
    assert summary["within_slo"] == pytest.approx(2 / 5)
    assert summary["wall_s"] == pytest.approx(4.2)
    assert summary["goodput_per_s"] == pytest.approx(2 / 4.2, abs=1e-3)
    assert summary["output_tokens"] == 44
    assert summary["ttft_s"]["max"] == 3.0
    assert summary["prefill"] == {"local": 4}
    console = Console(width=120, record=True, quiet=True)
    console.print(show.run({"summary": summary, "left_out": 2, "config": {"seed": 7}}))


def test_a_run_in_which_nothing_succeeded_has_a_summary_too() -> None:
    summary = summarise([outcome(0, error="connection")], None, None)
    assert (summary["ttft_s"], summary["hit_rate"], summary["requests_per_s"]) == (None, None, 0.0)
    Console(quiet=True).print(show.run({"summary": summary, "left_out": 0, "config": {"seed": 7}}))
    assert summarise([], None, None)["error_rate"] == 0.0


def test_figures_cover_the_last_requests_and_all_errors() -> None:
    figures = LiveFigures()
    assert figures.describe() == ""
    figures.take(RequestOutcome(0, 0.0, error="timeout"))
    for number in range(1100):
        ttft_s = 9.0 if number < 100 else 0.1
        figures.take(RequestOutcome(number, 0.0, ended_s=ttft_s + 0.9, ttft_s=ttft_s, output_tokens=10))
    assert figures.describe() == "TTFT p50 100.0 p99 100.0 ms, TPOT p50 100.0 p99 100.0 ms, 1 errors"
