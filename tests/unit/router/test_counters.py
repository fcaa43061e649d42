"""What the router's own counters and histograms show at a scrape is what prometheus_client's would show."""

from __future__ import annotations

import math
import re

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from router import counters as metrics

BOUNDS = (0.001, 0.5, 1, 2.5, 160)


def exposed(registry: CollectorRegistry) -> str:
    """The exposition, without the times at which the series began."""
    return re.sub(r"(_created(?:\{.*\})?) .*", r"\1", generate_latest(registry).decode())


@given(st.lists(st.sampled_from(BOUNDS) | st.floats(-1, 1e9) | st.just(math.inf), max_size=30))
def test_a_histogram_is_exposed_as_the_librarys(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    of_ours = metrics.Histogram("vllm:time_seconds", "Time \\ spent.", ["model"], buckets=BOUNDS, registry=ours)
    of_theirs = prometheus_client.Histogram(
        "vllm:time_seconds", "Time \\ spent.", ["model"], buckets=BOUNDS, registry=theirs
    )
    for model in ('a "model"', "another"):
        series, their_series = of_ours.labels(model), of_theirs.labels(model)
        for value in values:
            series.observe(value)
            their_series.observe(value)
    assert exposed(ours) == exposed(theirs)


def test_counters_are_exposed_as_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    metrics.Counter("plain", "Never counted.", registry=ours)
    prometheus_client.Counter("plain", "Never counted.", registry=theirs)
    labelled = metrics.Counter("vllm:request", "Requests.", ["code", "mode"], registry=ours)
    their_labelled = prometheus_client.Counter("vllm:request", "Requests.", ["code", "mode"], registry=theirs)
    for labels, value in ((("b", "x"), 3), (("a", "x\n"), 2**60), (("b", "x"), 1)):
        labelled.labels(*labels).value += value
        their_labelled.labels(*labels).inc(value)
    assert exposed(ours) == exposed(theirs)


@pytest.mark.parametrize("value", [math.nan, -math.nan])
def test_what_is_no_number_spoils_no_histogram(value: float) -> None:
    registry = CollectorRegistry()
    series = metrics.Histogram("seconds", "Time.", [], buckets=BOUNDS, registry=registry).labels()
    series.observe(value)
    series.observe(2)
    assert "seconds_sum 2.0\n" in exposed(registry)
    assert "seconds_count 1.0\n" in exposed(registry)
