"""The file of a run's results: written by `kvrelay load run`, `sweep` and `ab`, read by `compare` and `report`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError
from common.base.files import write_whole
from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.plan import LoadPlan
from kvrelay.load.processes import LoadFailed
from kvrelay.load.summary import percentile, summarise

Slo = tuple[float | None, float | None]
"""Goodput objectives: seconds to the first token, seconds per later token."""

_COLUMNS = ("sent_s", "ttft_s", "tpot_s", "e2e_s", "output_tokens", "error")


def run_result(
    plan: LoadPlan,
    rounds: Sequence[Sequence[RequestOutcome]],
    slo: Slo,
    *,
    began: float,
    left_out: int = 0,
    pair: str = "",
) -> dict[str, Any]:
    """The results of a run of one or more rounds. `pair`: the same for both sides of interleaved runs."""
    outcomes = _one_after_the_other(rounds)
    gaps = sorted(gap_s for outcome in outcomes if not outcome.error for gap_s in outcome.itl_s)
    return {
        "kind": "run",
        "began": began,
        "config": config_of(plan),
        "left_out": left_out,
        "summary": summarise(outcomes, *slo),
        "cached_before": cached_before(plan, outcomes),
        "pair": pair,
        "rounds": [summarise(outcomes, *slo) for outcomes in rounds],
        "samples": {name: [_rounded(getattr(outcome, name)) for outcome in outcomes] for name in _COLUMNS},
        "itl_quantiles_s": [round(percentile(gaps, percent), 6) for percent in range(101)] if gaps else [],
    }


def cached_before(plan: LoadPlan, outcomes: Sequence[RequestOutcome]) -> float:
    """The share of the prompts' unique tokens that the server had cached, which can only be from an earlier run with this seed.

    0 where it cannot be told: in sessions and traces prompts continue others.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    if plan.trace or plan.turns > 1:
        return 0.0
    prompts, cached = (sum(getattr(each, name) for each in good) for name in ("prompt_tokens", "cached_tokens"))
    unique = prompts - plan.prefix_tokens * len(good) if plan.longest_tokens else plan.suffix_tokens * len(good)
    return round(min(1.0, max(0.0, (cached - (prompts - unique)) / unique)), 6) if unique > 0 else 0.0


def config_of(plan: LoadPlan) -> dict[str, Any]:
    """The plan without its secrets."""
    return {key: value for key, value in dataclasses.asdict(plan).items() if key != "api_key"}


def _one_after_the_other(rounds: Sequence[Sequence[RequestOutcome]]) -> list[RequestOutcome]:
    """The outcomes of all rounds on one time axis, without the pauses between rounds."""
    joined: list[RequestOutcome] = []
    offset_s = 0.0
    for outcomes in rounds:
        first_s = min((outcome.sent_s for outcome in outcomes), default=0.0)
        for outcome in outcomes:
            sent_s, ended_s = (at_s - first_s + offset_s for at_s in (outcome.sent_s, outcome.ended_s))
            joined.append(dataclasses.replace(outcome, sent_s=sent_s, ended_s=ended_s))
        offset_s = max((outcome.ended_s for outcome in joined), default=0.0)
    return joined


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def write(path: Path, text: str) -> None:
    """Write the file of a result or a report. Raises: LoadFailed."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise LoadFailed(f"cannot write {path}: {error.strerror}") from None


def read_result(path: Path) -> dict[str, Any]:
    """Raises: ConfigError if the file holds no results."""
    try:
        result = json.loads(path.read_text("utf-8"))
        kind = result["kind"]
        needed = {"run": ("summary", "rounds", "samples"), "sweep": ("points",), "comparison": ("rows",)}[kind]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{path} holds no results of `kvrelay load`") from None
    missing = [name for name in needed if name not in result]
    if missing:
        raise ConfigError(f"{path} holds no results of `kvrelay load`: it lacks {', '.join(missing)}")
    return result
