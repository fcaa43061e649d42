"""Reports: one page for each kind of result, without scripts, escaped, and with nothing to fetch."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.plan import LoadPlan
from kvrelay.load.report.page import render, run_charts
from kvrelay.load.results import run_result
from kvrelay.load.sweep import SweepPlan, sweep

PLAN = LoadPlan(url="http://x", model="<script>alert(1)</script>")


def outcomes(rate: float = 10.0) -> list[RequestOutcome]:
    def one(number: int) -> RequestOutcome:
        sent_s, ttft_s = number / rate, 0.05 + 0.01 * (number % 7)
        return RequestOutcome(
            number,
            sent_s,
            ended_s=sent_s + ttft_s + 0.2,
            ttft_s=ttft_s,
            itl_s=[0.02] * 10,
            output_tokens=11,
            error="timeout" if number == 5 else "",
            detail="<img src=http://elsewhere>" if number == 5 else "",
        )

    return [one(number) for number in range(40)]


def results() -> dict[str, dict[str, Any]]:
    run = run_result(PLAN, [outcomes()], (0.1, None), began=0.0)
    side = {"config": run["config"], "samples": run["samples"]}
    row = {"name": "requests/s", "a": 2.0, "b": 3.0, "low": 1.4, "high": 1.6, "lower_is_better": False, "verdict": "B"}
    swept = sweep(SweepPlan(PLAN, (0.08, None), 0.5, (1.0, 2.0)), lambda plan: outcomes(plan.rate))
    comparison = {"kind": "comparison", "began": 0.0, "method": "pairs", "rows": [row], "a": side, "b": side}
    return {"run": run, "sweep": swept, "comparison": comparison}


class _Tags(HTMLParser):
    """Opened and not yet closed tags, and all that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag not in ("meta", "path", "circle", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("path", "circle"):
            return
        assert self.open.pop() == tag


@pytest.mark.parametrize("kind", ["run", "sweep", "comparison"])
def test_a_report_is_one_page_that_fetches_and_runs_nothing(kind: str) -> None:
    page = render(results()[kind])
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.fetched == []
    assert "script" not in tags.seen
    assert "img" not in tags.seen
    assert not re.search(r"url\(|@import", page)
    assert "<svg" in page
    assert "default-src 'none'" in page


def test_a_sweeps_report_names_the_highest_rate() -> None:
    result = results()["sweep"]
    assert result["best_rate"] == 2.0
    assert "2 requests/s or more is the highest rate (none that was tried is above it)" in render(result)
    assert "2 requests/s is the highest rate" in render({**result, "is_limit_found": True})


def test_charts_are_about_the_requests_that_succeeded() -> None:
    good = outcomes()
    refused = [replace(good[0], number=90, ended_s=0.001, ttft_s=None, output_tokens=0, error="HTTP 429")] * 40
    broken = [replace(good[0], number=91, ended_s=3.9, error="connection", output_tokens=5000)]
    charts = {
        chart.title: chart.series
        for chart in run_charts(run_result(PLAN, [good + refused + broken], (None, None), began=0.0))
    }
    whole = [x for x, _ in charts["Whole request"][0].points]
    assert (min(whole), max(whole)) == (pytest.approx(250), pytest.approx(310))
    assert max(y for _, y in charts["Output of requests as they end"][0].points) < 500
