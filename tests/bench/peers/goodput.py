"""Is disaggregation worth it here? Goodput of a mixed load at rising rates. The plan and the tables are pure."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench import client
from bench.peers.systems import MODEL_NAME

from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.plan import LoadPlan
from kvrelay.load.runner import LoadRunner
from kvrelay.load.summary import summarise
from kvrelay.load.workload import Workload

MIX = ((0.75, 128, 128), (0.25, 2048, 32))
"""(share of the requests, prompt tokens, output tokens)."""
RATES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Requests/s."""
WANTED_SHARE, HOPELESS_SHARE = 0.9, 0.4
"""A system's capacity is the highest rate with the first share inside the objectives; below the second it is not
measured at higher rates."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Objectives:
    """Seconds to the first token, and seconds per later token, of a request that counts."""

    ttft_s: float = 2.0
    tpot_s: float = 0.05


@dataclass(frozen=True)
class Point:
    """One system at one rate. `within`: share of the requests inside the objectives; times in seconds."""

    system: str
    rate: float
    within: float
    goodput_per_s: float
    itl_p99: float
    ttft_p99: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def mixed_plans(urls: Sequence[str], rate: float, duration_s: float, vocab_size: int) -> list[LoadPlan]:
    """Poisson arrivals of the mix, shared evenly among the URLs; the same for every system, other prompts at every rate."""
    return [
        LoadPlan(
            url=url,
            model=MODEL_NAME,
            rate=rate * share / len(urls),
            duration_s=duration_s,
            timeout_s=_TIMEOUT_S,
            prefix_tokens=0,
            suffix_tokens=prompt_tokens,
            output_tokens=output_tokens,
            vocab_size=vocab_size,
            seed=round(1000 * rate) * 100 + 10 * kind + place,
        )
        for kind, (share, prompt_tokens, output_tokens) in enumerate(MIX)
        for place, url in enumerate(urls)
    ]


def offer(plans: Sequence[LoadPlan]) -> list[RequestOutcome]:
    """Run the plans side by side, from one event loop."""
    outcomes: list[RequestOutcome] = []

    async def main() -> None:
        start_s = time.perf_counter() + 0.1
        runners = [LoadRunner(Workload(plan), 0, outcomes.append) for plan in plans]
        await asyncio.gather(*(runner.run(start_s) for runner in runners))

    client.run(main())
    return outcomes


def measure(
    system: str, urls: Sequence[str], rates: Sequence[float], duration_s: float, vocab_size: int, objectives: Objectives
) -> list[Point]:
    """One point per rate, rising, until too few requests are inside the objectives."""
    points: list[Point] = []
    for rate in rates:
        outcomes = offer(mixed_plans(urls, rate, duration_s, vocab_size))
        points.append(point(system, rate, outcomes, objectives))
        if points[-1].within < HOPELESS_SHARE:
            break
    return points


def point(system: str, rate: float, outcomes: Sequence[RequestOutcome], objectives: Objectives) -> Point:
    """What the outcomes of one rate amount to; a failed request is outside the objectives."""
    summary = summarise(outcomes, objectives.ttft_s, objectives.tpot_s)

    def p99(name: str) -> float:
        return math.nan if summary[name] is None else summary[name]["p99"]

    return Point(system, rate, summary["within_slo"], summary["goodput_per_s"], p99("itl_s"), p99("ttft_s"))


def capacity(points: Sequence[Point]) -> float:
    """The highest rate up to which the wanted share stays inside the objectives; 0 if it never does."""
    best = 0.0
    for found in sorted(points, key=lambda p: p.rate):
        if found.within < WANTED_SHARE:
            break
        best = found.rate
    return best


def table(points: Mapping[str, Sequence[Point]], titles: Mapping[str, str]) -> list[list[str]]:
    """Header and a row per rate: goodput, share inside the objectives, p99 between tokens; then the capacities."""
    rates = sorted({p.rate for found in points.values() for p in found})
    rows = [["requests/s", *(titles[name] for name in points)]]
    for rate in rates:
        at_rate = [next((p for p in found if p.rate == rate), None) for found in points.values()]
        rows.append([f"{rate:g}", *("" if p is None else _cell(p) for p in at_rate)])
    wanted = f"highest rate with {WANTED_SHARE:.0%} inside"
    rows.append([wanted, *(f"{capacity(found):g}" for found in points.values())])
    return rows


def _cell(found: Point) -> str:
    itl = "-" if math.isnan(found.itl_p99) else f"{1e3 * found.itl_p99:.0f}"
    return f"{found.goodput_per_s:.2f}/s ({found.within:.0%}), {itl} ms"
