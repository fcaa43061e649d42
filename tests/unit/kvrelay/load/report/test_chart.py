"""Charts: round marks, escaped names, points inside the drawing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from kvrelay.load.report.chart import HEIGHT, WIDTH, Axis, Chart, Series


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0.0, 100.0, [0, 20, 40, 60, 80, 100]),
        (0.0, 0.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3.0, 17.0, [0, 5, 10, 15, 20]),
        (0.0, 0.0031, [0, 0.001, 0.002, 0.003, 0.004]),
        (7.0, 7.0, [6, 8, 10, 12, 14]),
    ],
)
def test_marks_are_round_and_hold_the_values(low: float, high: float, marks: list[float]) -> None:
    axis = Axis.around(low, high, 0.0, 1.0)
    assert axis.low <= low
    assert axis.high >= high
    assert axis.marks() == pytest.approx(marks)


def test_a_drawing_is_well_formed_and_inside_its_frame() -> None:
    many = [(float(x), float(x % 97)) for x in range(50_000)]
    chart = Chart(
        "a <b>", "x & y", "ms", [Series("one", [(0, 1), (5, 2)]), Series("two", many, scatter=True)], [("max", 120)]
    )
    root = ET.fromstring(chart.svg())
    assert root[0].text == "a <b>"
    assert len(chart.svg()) < 100_000
    for numbers in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", chart.svg()):
        assert 0 <= float(numbers[0]) <= WIDTH
        assert 0 <= float(numbers[1]) <= HEIGHT


def test_a_chart_without_points_is_left_out() -> None:
    assert Chart("t", "x", "y", [Series("none", [])]).html() == ""
