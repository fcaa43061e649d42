"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from common.base.sentences import counted
from kvrelay.admin.show import Fitted, percent, size, table
from kvrelay.load.report.page import comparison_rows, latency_rows, objectives, sweep_rows
from kvrelay.load.summary import STATISTICS

_LATE_S = 0.01
_CACHED_BEFORE = 0.5
"""A warning is shown if a larger share of the unique tokens was cached. Not 0: a chat's words may be fewer tokens than words."""


def run(result: Mapping[str, Any]) -> RenderableType:
    """The result of a run."""
    summary, left_out = result["summary"], result["left_out"]
    facts = [*_facts(summary, left_out), ["seed", f"{result['config']['seed']} (--seed repeats these prompts)"]]
    parts: list[RenderableType] = [table("", ("", ""), facts, numeric=False)]
    if rows := latency_rows(summary):
        parts.append(table("latency, ms", ("", *STATISTICS), rows))
    parts += [Text(f"error: {detail}", "red") for detail in summary["first_errors"]]
    if (cached := result.get("cached_before", 0.0)) > _CACHED_BEFORE:
        warning = f"{100 * cached:.0f} % of what is unique in each prompt was in the server's cache before this run"
        parts.append(Text(f"{warning}: another run had --seed {result['config']['seed']}; leave it out", "yellow"))
    late = summary["late_s"]
    if late is not None and late["p99"] > _LATE_S:
        warning = f"the load generator was late: 1 % of requests were sent {1000 * late['p99']:.1f} ms or more late"
        parts.append(Text(f"{warning}; try --processes", "yellow"))
    return Group(*parts)


def sweep(result: Mapping[str, Any]) -> RenderableType:
    """The result of `sweep.sweep`."""
    columns = ("rate/s", "goodput/s", "inside %", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "errors %")
    best = result["best_rate"]
    share = f"{100 * result['attainment']:g} % of the requests inside {objectives(result['slo'])}"
    least = "" if result.get("is_limit_found", True) else "at least "
    found = f"highest rate with {share}: {least}{best:.3g}/s" if best else f"no rate had {share}"
    return Group(table("goodput (times in ms)", columns, sweep_rows(result)), Text(found, "bold"))


def comparison(result: Mapping[str, Any]) -> RenderableType:
    """The result of `compare.compare`, as its file has it."""
    columns = ("", "A", "B", "B / A", "95 % interval", "verdict")
    rows: list[Mapping[str, Any]] = [dict(zip(columns, row, strict=True)) for row in comparison_rows(result)]
    return Fitted(rows, ("95 % interval", "B", "A"), f"{result['method']} (times in ms)")


def _facts(summary: Mapping[str, Any], left_out: int) -> list[list[Any]]:
    errors = ", ".join(f"{count} x {kind}" for kind, count in summary["errors"].items())
    wanted = objectives(summary["slo"])
    facts = [
        ["requests", f"{summary['succeeded']} of {summary['requests']} succeeded in {summary['wall_s']:.1f} s"],
        ["errors", errors or "none"],
        ["requests/s", f"{summary['requests_per_s']:.2f}"],
        ["tokens/s", f"{summary['output_tokens_per_s']:.1f} out, {summary['prompt_tokens_per_s']:.1f} in"],
        ["prefix hits", percent(summary["cached_tokens"], summary["prompt_tokens"])],
        ["prefill", _counts(summary["prefill"])],
        ["KV relayed", size(summary["relayed_bytes"]) if summary["relayed_bytes"] else None],
        ["by prefill node", _counts(summary["prefill_nodes"])],
        ["by decode node", _counts(summary["decode_nodes"])],
        ["goodput", f"{summary['goodput_per_s']:.2f}/s, {100 * summary['within_slo']:.1f} % within {wanted}"]
        if wanted
        else ["goodput", None],
    ]
    if summary["retried"]:
        facts.append(["retried", counted(summary["retried"], "request")])
    if left_out:
        facts.append(["left out", f"{counted(left_out, 'request')} of the trace, longer than the model's context"])
    return [fact for fact in facts if fact[1] is not None]


def _counts(counts: Mapping[str, int]) -> str | None:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or None
