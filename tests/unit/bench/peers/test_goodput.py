"""Whether disaggregation is worth it: the mixed load, the points and the table."""

from __future__ import annotations

import math

import pytest
from bench.peers import goodput
from bench.peers.goodput import Objectives, Point, capacity, mixed_plans, point, table

from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.workload import Workload


def at(rate: float, within: float, system: str = "kvrelay") -> Point:
    return Point(system, rate, within, rate * within, 0.02, 1.0)


def test_the_mix_arrives_at_the_asked_rate_shared_among_the_servers() -> None:
    plans = mixed_plans(["http://a", "http://b"], rate=4.0, duration_s=500.0, vocab_size=8192)
    jobs = {plan.url: 0 for plan in plans}
    long = 0
    for plan in plans:
        plan.check()
        sent = list(Workload(plan).jobs())
        jobs[plan.url] += len(sent)
        long += len(sent) * (plan.suffix_tokens == 2048)
        assert {len(job.prompt) for job in sent[:3]} == {plan.suffix_tokens}
    assert sum(jobs.values()) == pytest.approx(2000, rel=0.1)
    assert jobs["http://a"] == pytest.approx(jobs["http://b"], rel=0.15)
    assert long == pytest.approx(500, rel=0.2)


def test_every_system_gets_the_same_load_and_every_rate_other_prompts() -> None:
    def prompts(rate: float) -> list[object]:
        return [job.prompt for plan in mixed_plans(["http://a"], rate, 5.0, 8192) for job in Workload(plan).jobs()]

    assert prompts(2.0) == prompts(2.0)
    assert prompts(2.0)[0] not in prompts(3.0)


def test_a_point_counts_requests_inside_both_objectives() -> None:
    def answer(ttft_s: float, tpot_s: float, error: str = "") -> RequestOutcome:
        ended = ttft_s + 10 * tpot_s
        return RequestOutcome(0, 0.0, ended_s=ended, ttft_s=ttft_s, itl_s=[tpot_s] * 10, output_tokens=11, error=error)

    outcomes = [answer(1.0, 0.04), answer(3.0, 0.04), answer(1.0, 0.06), answer(1.0, 0.04, "HTTP 503")]
    found = point("kvrelay", 2.0, outcomes, Objectives(ttft_s=2.0, tpot_s=0.05))
    assert found.within == 0.25
    assert found.itl_p99 == pytest.approx(0.06)


def test_a_rate_at_which_nothing_succeeds_is_a_point_too() -> None:
    found = point("kvrelay", 2.0, [RequestOutcome(0, 0.0, error="timeout", ended_s=60.0)], Objectives())
    assert found.within == 0.0
    assert math.isnan(found.itl_p99)


def test_the_capacity_ends_at_the_first_rate_that_falls_short() -> None:
    assert capacity([at(2.0, 0.8), at(1.0, 0.95), at(3.0, 0.99)]) == 1.0
    assert capacity([at(1.0, 0.5)]) == 0.0


def test_rates_rise_until_too_few_requests_count(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([1.0, 0.6, 0.1])
    monkeypatch.setattr(goodput, "offer", lambda plans: [])
    monkeypatch.setattr(goodput, "point", lambda system, rate, outcomes, objectives: at(rate, next(shares)))
    points = goodput.measure("kvrelay", ["http://a"], [1.0, 2.0, 3.0, 4.0], 1.0, 8192, Objectives())
    assert [found.rate for found in points] == [1.0, 2.0, 3.0]


def test_the_table_leaves_rates_empty_that_were_not_measured() -> None:
    points = {"kvrelay": [at(1.0, 1.0), at(2.0, 0.5)], "vllm-256": [at(1.0, 0.95, "vllm-256")]}
    rows = table(points, {"kvrelay": "kvrelay", "vllm-256": "vLLM"})
    assert rows[0] == ["requests/s", "kvrelay", "vLLM"]
    assert rows[1] == ["1", "1.00/s (100%), 20 ms", "0.95/s (95%), 20 ms"]
    assert rows[2][2] == ""
    assert rows[3] == ["highest rate with 90% inside", "1", "1"]
