"""The figures of runs as a table with one column per policy. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

Figures = dict[str, Any]


def _share(value: float) -> str:
    return f"{value:.1%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _spread(name: str, label: str) -> list[tuple[str, Callable[[Figures], str]]]:
    return [
        (f"{label}, {part}", lambda figures, part=part: _seconds(figures[name][part]))
        for part in ("mean", "p50", "p90", "p99")
    ]


_ROWS: list[tuple[str, Callable[[Figures], str]]] = [
    ("requests (refused)", lambda f: f"{f['requests']:,} ({sum(f['refused'].values()):,})"),
    ("requests/s", lambda f: f"{f['request_rate']:.2f}"),
    ("prefix hit rate", lambda f: _share(f["hit_rate"])),
    *_spread("ttft_s", "time to first token"),
    *_spread("tpot_s", "time per output token"),
    ("inside both objectives", lambda f: _share(f["goodput"])),
    ("of these, requests/s", lambda f: f"{f['good_rate']:.2f}"),
    ("output tokens/s", lambda f: f"{f['output_token_rate']:,.0f}"),
    ("busy prefill nodes", lambda f: _share(f["prefill_utilisation"])),
    ("prefill work, busiest over mean", lambda f: _ratio(f["prefill_imbalance"])),
    ("sequences, busiest decode node over mean", lambda f: _ratio(f["decode_imbalance"])),
    ("prompts computed by decode nodes", lambda f: f"{f['local_prefills']:,}"),
    ("KV relayed", lambda f: f"{f['relayed_bytes'] / 1e9:,.0f} GB"),
]


def table(figures: Sequence[Figures]) -> Table:
    """One row per figure, one column per run."""
    made = Table("figure")
    for column in figures:
        made.add_column(f"{column['policy']} (rate x {column['rate_scale']:.3g})", justify="right")
    for name, show in _ROWS:
        made.add_row(name, *(show(column) for column in figures))
    return made


def table_of_shapes(figures: Sequence[Figures]) -> Table:
    """One row per shape of the cluster."""
    made = Table(
        "prefill + decode",
        "inside both objectives",
        "good requests per node-hour",
        "first token, p90",
        "token, p90",
    )
    for row in figures:
        latencies = (_seconds(row[name]["p90"]) for name in ("ttft_s", "tpot_s"))
        made.add_row(row["shape"], _share(row["goodput"]), f"{row['good_per_node_hour']:,.0f}", *latencies)
    return made
