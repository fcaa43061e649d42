"""A chart as SVG: lines or points over two axes, with limits. Pure.

Colours come from the page's style sheet: classes `s0`, `s1` and so on, in the order of the series.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 20, 16, 44
_MOST_POINTS = 2000


@dataclass(frozen=True)
class Series:
    """Points of one kind, joined by a line unless `scatter`."""

    name: str
    points: Sequence[tuple[float, float]]
    scatter: bool = False


@dataclass(frozen=True)
class Chart:
    """What a chart shows. `limits`: horizontal lines with their names."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    limits: Sequence[tuple[str, float]] = field(default_factory=tuple[tuple[str, float], ...])
    y_max: float | None = None

    def svg(self) -> str:
        """The drawing; empty without points."""
        series = [Series(one.name, _thinned(one.points), one.scatter) for one in self.series if one.points]
        if not series:
            return ""
        xs = [x for one in series for x, _ in one.points]
        ys = [y for one in series for _, y in one.points] + [value for _, value in self.limits]
        x_axis = Axis.around(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
        y_axis = Axis.around(0.0, self.y_max or max(ys), HEIGHT - _BOTTOM, _TOP)
        parts = [f'<svg role="img" viewBox="0 0 {WIDTH} {HEIGHT}"><title>{escape(self.title)}</title>']
        parts += _grid(x_axis, y_axis)
        parts.append(_text(WIDTH / 2, HEIGHT - 8, self.x_label, "middle"))
        parts.append(f'<g transform="rotate(-90)">{_text(-(HEIGHT - _BOTTOM) / 2, 14, self.y_label, "middle")}</g>')
        for name, value in self.limits:
            y = y_axis.place(value)
            parts.append(f'<path class="limit" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
            parts.append(_text(WIDTH - _RIGHT, y - 4, name, "end"))
        for index, one in enumerate(series):
            parts += _draw(one, index, x_axis, y_axis)
        return "".join([*parts, "</svg>"])

    def html(self) -> str:
        """The drawing with its title and a legend; empty without points."""
        drawing = self.svg()
        if not drawing:
            return ""
        names = [one.name for one in self.series if one.points]
        keys = "".join(f'<span class="key k{index}">{escape(name)}</span>' for index, name in enumerate(names))
        legend = f"<p>{keys}</p>" if len(names) > 1 else ""
        return f"<figure><figcaption>{escape(self.title)}</figcaption>{drawing}{legend}</figure>"


@dataclass(frozen=True)
class Axis:
    """Maps values to places: `low` to `begin`, `high` to `end`; `step` apart are its marks."""

    low: float
    high: float
    step: float
    begin: float
    end: float

    @classmethod
    def around(cls, low: float, high: float, begin: float, end: float) -> Axis:
        """An axis of round marks that holds both values."""
        high = high if high > low else low + (abs(low) or 1.0)
        raw = (high - low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
        lowest = math.floor(low / step + 1e-9) * step
        highest = max(math.ceil(high / step - 1e-9) * step, lowest + step)
        return cls(lowest, highest, step, begin, end)

    def place(self, value: float) -> float:
        """The place of a value; values outside are at the edge."""
        share = (value - self.low) / (self.high - self.low)
        return self.begin + (self.end - self.begin) * min(1.0, max(0.0, share))

    def marks(self) -> list[float]:
        """The values with a mark."""
        return [self.low + index * self.step for index in range(round((self.high - self.low) / self.step) + 1)]


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most some thousand points, evenly spaced, so that a report is small enough for a mail."""
    stride = math.ceil(len(points) / _MOST_POINTS)
    return points[::stride] if stride > 1 else points


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    parts: list[str] = []
    for value in y_axis.marks():
        y = y_axis.place(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:g}", "end"))
    for value in x_axis.marks():
        parts.append(_text(x_axis.place(value), HEIGHT - _BOTTOM + 16, f"{value:g}", "middle"))
    return parts


def _draw(series: Series, index: int, x_axis: Axis, y_axis: Axis) -> list[str]:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in series.points]
    if series.scatter:
        dots = "".join(f"M{x:.1f} {y:.1f}h.01" for x, y in places)
        return [f'<path class="dots s{index}" d="{dots}"/>']
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    parts = [f'<path class="line s{index}" d="M{line}"/>']
    if len(places) <= 30:  # few enough to be told apart, and pointed at
        for (x, y), (value, at) in zip(places, series.points, strict=True):
            told = escape(f"{series.name}: {value:.4g}, {at:.4g}")
            parts.append(f'<circle class="s{index}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{told}</title></circle>')
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
