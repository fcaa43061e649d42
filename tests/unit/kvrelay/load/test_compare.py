"""Comparisons: a real difference is shown, none is invented, and pairs cancel what disturbs both sides."""

from __future__ import annotations

import random
from typing import Any

import pytest

from common.base.errors import ConfigError
from kvrelay.load.compare import Row, compare
from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.plan import LoadPlan
from kvrelay.load.results import run_result
from kvrelay.load.summary import window_rates

PLAN = LoadPlan(url="http://x", model="m")


def a_round(rng: random.Random, ttft_s: float, count: int = 200, pace_s: float = 0.1) -> list[RequestOutcome]:
    outcomes: list[RequestOutcome] = []
    for number in range(count):
        sent_s, wait_s = number * pace_s, ttft_s * rng.uniform(0.8, 1.2)
        outcomes.append(
            RequestOutcome(
                number, sent_s, ended_s=sent_s + wait_s + 0.1, ttft_s=wait_s, output_tokens=11, prompt_tokens=9
            )
        )
    return outcomes


def result(*rounds: list[RequestOutcome], pair: str = "") -> dict[str, Any]:
    return run_result(PLAN, rounds, (1.0, None), began=0.0, pair=pair)


def rows(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Row]:
    return {row.name: row for row in compare(a, b)[1]}


def test_a_slower_server_is_told_from_an_equal_one() -> None:
    rng = random.Random(1)
    base, same, slower = (result(a_round(rng, ttft_s)) for ttft_s in (0.2, 0.2, 0.24))
    equal, worse = rows(base, same), rows(base, slower)
    assert equal["time to first token, p50"].verdict == "undecided"
    assert equal["requests/s"].verdict == "undecided"
    for name in ("mean", "p50", "p99"):
        row = worse[f"time to first token, {name}"]
        assert row.verdict == "A is better"
        assert row.low is not None
        assert row.low < 1.2 < (row.high or 0.0)
    assert rows(slower, base)["time to first token, mean"].verdict == "B is better"


def test_a_faster_pace_is_a_higher_rate() -> None:
    rng = random.Random(2)
    slow, fast = result(a_round(rng, 0.2)), result(a_round(rng, 0.2, pace_s=0.08))
    row = rows(slow, fast)["requests/s"]
    assert row.verdict == "B is better"
    assert row.b / row.a == pytest.approx(1.25, rel=0.03)


def test_interleaved_rounds_cancel_what_disturbs_both_sides() -> None:
    rng = random.Random(3)
    disturbed = (0.2, 0.9, 0.3, 0.6, 0.25, 0.5)
    a = result(*(a_round(rng, ttft_s, 60) for ttft_s in disturbed), pair="p")
    b = result(*(a_round(rng, 1.05 * ttft_s, 60) for ttft_s in disturbed), pair="p")
    method, _ = compare(a, b)
    assert "6 interleaved rounds" in method
    assert rows(a, b)["time to first token, mean"].verdict == "A is better"
    assert rows(a, {**b, "pair": "other"})["time to first token, mean"].verdict == "undecided"


def test_rounds_are_put_one_after_the_other() -> None:
    rng = random.Random(4)
    joined = result(a_round(rng, 0.2, 100), a_round(rng, 0.2, 100))
    assert joined["summary"]["wall_s"] == pytest.approx(2 * 10.2, rel=0.02)
    assert len(joined["rounds"]) == 2
    assert sum(window_rates(joined, "requests_per_s", 10)) / 10 == pytest.approx(
        joined["summary"]["requests_per_s"], 0.01
    )


def test_runs_without_answers_are_refused() -> None:
    failed = result([RequestOutcome(0, 0.0, error="timeout", ended_s=1.0)])
    with pytest.raises(ConfigError, match="successful"):
        compare(failed, failed)
    with pytest.raises(ConfigError, match="load run"):
        compare({"kind": "sweep"}, failed)
