"""`kvrelay load sweep`: runs at rising rates, and the highest one inside the objectives."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.admin.client import AdminUnreachable
from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.plan import LoadPlan
from kvrelay.load.results import Slo, config_of
from kvrelay.load.search import RateSearch
from kvrelay.load.summary import summarise

_KEPT = (
    *("requests", "requests_per_s", "goodput_per_s", "within_slo", "error_rate", "output_tokens_per_s"),
    *("ttft_s", "tpot_s", "itl_s", "e2e_s"),
)
_LOWEST = 0.01
"""No rate below this is tried."""


@dataclass(frozen=True)
class SweepPlan:
    """The rates to try: `rates` if given, else those that a search proposes."""

    base: LoadPlan
    slo: Slo
    attainment: float
    """Share of the requests that must be inside the objectives."""
    rates: tuple[float, ...] = ()
    first: float = 1.0
    precision: float = 0.1
    highest: float = 1000.0


def sweep(
    plan: SweepPlan,
    measure: Callable[[LoadPlan], Sequence[RequestOutcome]],
    *,
    ask: Callable[[], object] = lambda: None,
    on_left: Callable[[int, int], None] = lambda least, most: None,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Run at each rate, until KeyboardInterrupt. Returns the content of the result file; its points are in order of their rates.

    `ask()` is called after a rate at which connections broke. If it raises AdminUnreachable, the server is gone: the sweep
    ends, and `failure` of the result says so. `on_left` gets before each rate how many are left, at least and at most; `keep`
    gets after each the result so far, so that it stays whatever ends the sweep.
    """
    began, failure = time.time(), ""
    points: list[dict[str, Any]] = []
    met = [0.0]

    def try_rate(rate: float) -> bool:
        # Other prompts at every rate: else a rate would find those of the last one in the prefix cache.
        at_rate = dataclasses.replace(plan.base, rate=rate, seed=plan.base.seed + 1000 * len(points))
        outcomes = measure(at_rate)
        summary = summarise(outcomes, *plan.slo)
        points.append({"rate": rate} | {key: summary[key] for key in _KEPT})
        is_met = summary["requests"] > 0 and summary["within_slo"] >= plan.attainment
        if is_met:
            met.append(rate)
        keep(result())
        if any(outcome.error == "connection" for outcome in outcomes):
            ask()
        return is_met

    def result() -> dict[str, Any]:
        ordered = sorted(points, key=lambda point: point["rate"])
        slo = {"ttft_s": plan.slo[0], "tpot_s": plan.slo[1]}
        found = {"best_rate": max(met), "is_limit_found": any(point["rate"] > max(met) for point in points)}
        more = {"attainment": plan.attainment, "slo": slo, "points": ordered, "failure": failure}
        return {"kind": "sweep", "began": began, "config": config_of(plan.base), **found, **more}

    try:
        for number, rate in enumerate(plan.rates):
            on_left(len(plan.rates) - number, len(plan.rates) - number)
            try_rate(rate)
        search = RateSearch(plan.first, plan.precision, lowest=_LOWEST, highest=plan.highest)
        while not plan.rates and (rate := search.next_rate) is not None:
            on_left(*search.left())
            search.record(met=try_rate(rate))
    except KeyboardInterrupt:  # ends the sweep but keeps the report
        pass
    except AdminUnreachable as error:
        failure = f"the server was lost at {points[-1]['rate']:.3g} requests/s: {error.message}"
    return result()
