"""What a benchmark reports: figures, each beside its limit or peer from the same run; as a table and as JSON. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Target:
    """What the figure itself (`of_share` False) or its share of the limit must be, at least or at most."""

    bound: float
    at_most: bool = False
    of_share: bool = False

    def met_by(self, figure: Figure) -> bool | None:
        """Whether it is met; None where there is nothing to judge."""
        value = figure.share if self.of_share else figure.value
        if value is None or math.isnan(value):
            return None
        return value <= self.bound if self.at_most else value >= self.bound


@dataclass(frozen=True)
class Figure:
    """One measured number. `limit` was measured in the same run: what the machine or a peer can do at best."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    limit_name: str = ""
    target: Target | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """`value / limit`, if there is a limit."""
        return None if not self.limit else self.value / self.limit

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target is None else self.target.met_by(self)


@dataclass
class Result:
    """All figures of one benchmark, and what they were taken with."""

    bench: str
    figures: list[Figure] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    """Raw samples and sizes, for the JSON only."""

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        limit: float | None = None,
        limit_name: str = "",
        target: Target | None = None,
        note: str = "",
    ) -> None:
        """Append one figure."""
        self.figures.append(Figure(name, value, unit, limit, limit_name, target, note))

    def as_json(self) -> dict[str, Any]:
        """Plain data; NaN becomes null."""
        figures = [
            {
                "name": f.name,
                "value": finite(f.value),
                "unit": f.unit,
                "limit": finite(f.limit),
                "limit_name": f.limit_name,
                "share": finite(f.share),
                "target": None if f.target is None else vars(f.target),
                "met": f.met,
                "note": f.note,
            }
            for f in self.figures
        ]
        return {"bench": self.bench, "figures": figures, "details": self.details}


def save(result: Result, machine: dict[str, Any], folder: Path) -> Path:
    """Write `folder`/<bench>.json and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.bench}.json"
    path.write_text(json.dumps({"machine": machine, **result.as_json()}, indent=1) + "\n", "utf-8")
    return path


def print_table(results: Sequence[Result], machine: dict[str, Any], console: Console, title: str = "") -> None:
    """One table of all results."""
    title = title or f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"
    table = Table(title=title, title_justify="left", caption_justify="left", show_lines=False)
    for name, justify in (
        ("figure", "left"),
        ("value", "right"),
        ("limit or peer, same run", "left"),
        ("share", "right"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    table.add_column("target", justify="right")
    table.add_column("met")
    for result in results:
        table.add_section()
        table.add_row(f"[bold]{result.bench}[/bold]")
        for figure in result.figures:
            table.add_row(*_cells(figure))
    console.print(table)


def _cells(figure: Figure) -> list[str]:
    name = f"  {figure.name}" + (f"\n  [dim]{figure.note}[/dim]" if figure.note else "")
    limit = "" if figure.limit is None else f"{figure.limit_name} {number(figure.limit)}"
    share = "" if figure.share is None else f"{figure.share:.1%}" if figure.share < 10 else f"{figure.share:.0f} x"
    target = ""
    if figure.target is not None:
        bound = figure.target.bound
        text = (
            f"{bound:.0%} of it"
            if figure.target.of_share and bound < 1
            else f"{bound:.3g}"
            if bound < 1000
            else f"{bound:,.0f}"
        )
        text += " x it" if figure.target.of_share and bound >= 1 else ""
        target = ("<= " if figure.target.at_most else ">= ") + text
    met = {None: "", True: "[green]met[/green]", False: "[red]not met[/red]"}[figure.met]
    return [name, f"{number(figure.value)} {figure.unit}", limit, share, target, met]


def number(value: float) -> str:
    """Three significant digits; "-" for NaN."""
    if math.isnan(value):
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def finite(value: float | None) -> float | None:
    """For JSON: null for what is not a number."""
    return None if value is None or not math.isfinite(value) else value


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, interpolated; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """The 50th percentile; NaN of nothing."""
    return percentile(values, 0.5)
