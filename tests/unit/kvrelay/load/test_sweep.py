"""Sweeps: each rate with prompts of its own, the best one found, Ctrl-C keeps what was measured."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvrelay.admin.client import AdminUnreachable
from kvrelay.load import show
from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.plan import LoadPlan
from kvrelay.load.sweep import SweepPlan, sweep

BASE = LoadPlan(url="http://x", model="m", rate=1.0, duration_s=10.0, api_key="secret")


def server(plan: LoadPlan) -> list[RequestOutcome]:
    """Fast up to 20 requests/s, slow above."""
    ttft_s = 0.1 if plan.rate <= 20.0 else 5.0
    return [RequestOutcome(n, n / plan.rate, ended_s=n / plan.rate + ttft_s, ttft_s=ttft_s) for n in range(30)]


def test_the_highest_rate_inside_the_objectives_is_found() -> None:
    seeds: list[int] = []

    def measure(plan: LoadPlan) -> list[RequestOutcome]:
        seeds.append(plan.seed)
        return server(plan)

    result = sweep(SweepPlan(BASE, (1.0, None), 0.9), measure)
    assert 20 / 1.1 <= result["best_rate"] <= 20
    rates = [point["rate"] for point in result["points"]]
    assert rates == sorted(rates)
    assert len(set(seeds)) == len(seeds) == len(rates)
    assert "secret" not in str(result)


def test_given_rates_are_measured_in_spite_of_a_miss() -> None:
    result = sweep(SweepPlan(BASE, (1.0, None), 0.9, (40.0, 5.0, 10.0)), server)
    assert [point["rate"] for point in result["points"]] == [5.0, 10.0, 40.0]
    assert result["best_rate"] == 10.0


def test_an_interrupted_sweep_reports_what_it_has() -> None:
    def measure(plan: LoadPlan) -> list[RequestOutcome]:
        if plan.rate > 4:
            raise KeyboardInterrupt
        return server(plan)

    result = sweep(SweepPlan(BASE, (1.0, None), 0.9), measure)
    assert result["best_rate"] == 4.0
    assert len(result["points"]) == 3


def test_no_answer_meets_nothing() -> None:
    result = sweep(SweepPlan(BASE, (1.0, None), 0.9, (1.0,)), lambda plan: [])
    assert result["best_rate"] == 0.0
    assert result["points"][0]["ttft_s"] is None


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_requests_that_failed_are_not_inside_the_objectives(share: float) -> None:
    def measure(plan: LoadPlan) -> list[RequestOutcome]:
        return [
            RequestOutcome(n, 0.0, error="timeout" if n < 20 * share else "", ended_s=1.0, ttft_s=0.1)
            for n in range(20)
        ]

    assert sweep(SweepPlan(BASE, (1.0, None), 0.6, (1.0,)), measure)["best_rate"] == 0.0


@pytest.mark.parametrize("rates", [(), (1.0, 4.0, 2.0)])
def test_a_server_that_is_gone_ends_the_sweep_but_keeps_the_points(rates: tuple[float, ...]) -> None:
    def measure(plan: LoadPlan) -> list[RequestOutcome]:
        return [RequestOutcome(0, 0.0, error="connection", ended_s=1.0)] if plan.rate > 3 else server(plan)

    def ask() -> None:
        raise AdminUnreachable("refused")

    result = sweep(SweepPlan(BASE, (1.0, None), 0.9, rates), measure, ask=ask)
    assert result["failure"] == "the server was lost at 4 requests/s: refused"
    assert [point["rate"] for point in result["points"]] == ([1.0, 4.0] if rates else [1.0, 2.0, 4.0])


def test_connections_that_an_overloaded_server_breaks_are_missed_objectives() -> None:
    def measure(plan: LoadPlan) -> list[RequestOutcome]:
        return [RequestOutcome(0, 0.0, error="connection", ended_s=1.0)] if plan.rate > 3 else server(plan)

    result = sweep(SweepPlan(BASE, (1.0, None), 0.9), measure)
    assert 3 / 1.1 <= result["best_rate"] <= 3
    assert result["failure"] == ""


def test_a_limit_that_was_not_found_is_called_a_lower_bound() -> None:
    for rates, found in (((1.0, 2.0), False), ((10.0, 40.0), True), ((40.0, 10.0), True)):
        result = sweep(SweepPlan(BASE, (1.0, None), 0.9, rates), server)
        assert result["is_limit_found"] is found
        console = Console(file=io.StringIO(), width=200)
        console.print(show.sweep(result))
        assert isinstance(console.file, io.StringIO)
        assert (f"at least {result['best_rate']:.3g}/s" in console.file.getvalue()) is not found


def test_the_report_so_far_is_kept_after_each_rate_and_the_rates_left_are_told_before() -> None:
    kept: list[int] = []
    left: list[tuple[int, int]] = []

    def measure(plan: LoadPlan) -> list[RequestOutcome]:
        if plan.rate > 4:
            raise RuntimeError("a bug")
        return server(plan)

    with pytest.raises(RuntimeError):
        sweep(
            SweepPlan(BASE, (1.0, None), 0.9),
            measure,
            on_left=lambda least, most: left.append((least, most)),
            keep=lambda result: kept.append(len(result["points"])),
        )
    assert kept == [1, 2, 3]
    assert len(left) == 4
