"""Terminal output of a run: progress while it runs, tables at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from common.tools.admin.show import percent, size, table
from common.tools.load.summary import PERCENTILES

_LATE_S = 0.01
_LATENCIES = (
    ("time to first token", "ttft_s"),
    ("between tokens (events)", "itl_s"),
    ("per token after the first", "tpot_s"),
    ("whole request", "e2e_s"),
)


def progress() -> Progress:
    """A progress bar on standard error, so that standard output can be piped; shown only in a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def report(summary: Mapping[str, Any], left_out: int) -> RenderableType:
    """The result of `summary.summarise` as tables."""
    names = ("mean", *(f"p{number}" for number in PERCENTILES), "max")
    rows = [
        [title, *(_milliseconds(summary[key][name]) for name in names)]
        for title, key in _LATENCIES
        if summary[key] is not None
    ]
    parts: list[RenderableType] = [table("", ("", ""), _facts(summary, left_out), numeric=False)]
    if rows:
        parts.append(table("latency, ms", ("", *names), rows))
    parts += [Text(f"error: {detail}", "red") for detail in summary["first_errors"]]
    late = summary["late_s"]
    if late is not None and late["p99"] > _LATE_S:
        warning = f"the load generator was late: 1 % of requests were sent {_milliseconds(late['p99'])} ms or more late"
        parts.append(Text(f"{warning}; try --processes", "yellow"))
    return Group(*parts)


def _facts(summary: Mapping[str, Any], left_out: int) -> list[list[Any]]:
    errors = ", ".join(f"{count} x {kind}" for kind, count in summary["errors"].items())
    slo = summary["slo"]
    objectives = ", ".join(
        f"{name} <= {value:g} s" for name, value in (("TTFT", slo["ttft_s"]), ("TPOT", slo["tpot_s"])) if value
    )
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
        ["goodput", f"{summary['goodput_per_s']:.2f}/s, {100 * summary['within_slo']:.1f} % within {objectives}"]
        if objectives
        else ["goodput", None],
    ]
    if summary["retried"]:
        facts.append(["retried", f"{summary['retried']} requests"])
    if left_out:
        facts.append(["left out", f"{left_out} requests of the trace are longer than the model's context"])
    return [fact for fact in facts if fact[1] is not None]


def _counts(counts: Mapping[str, int]) -> str | None:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or None


def _milliseconds(value_s: float) -> str:
    return f"{1000 * value_s:.1f}"
