"""Counters and histograms for one thread. Router process, event loop.

An update of prometheus_client's types takes a lock and several calls. These are plain numbers until a scrape; its text is equal.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]


class CounterSeries:
    """One series of a `Counter`. Its owner increases `value`."""

    __slots__ = ("created_s", "value")

    def __init__(self) -> None:
        self.value: float = 0
        self.created_s = time.time()


class Counter(Collector):
    """A counter family. Without label names, its only series exists from the start."""

    def __init__(self, name: str, text: str, label_names: Iterable[str] = (), *, registry: CollectorRegistry) -> None:
        self._name, self._text, self._label_names = name, text, tuple(label_names)
        self.series: dict[tuple[str, ...], CounterSeries] = {}
        if not self._label_names:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> CounterSeries:
        """The series with these label values, made at its first use."""
        return self.series.setdefault(values, CounterSeries())

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._label_names)
        for values, count in self.series.items():
            family.add_metric(values, count.value, created=count.created_s)
        return [family]


class HistogramSeries:
    """One series of a `Histogram`."""

    __slots__ = ("_bounds", "counts", "created_s", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Number of values per bucket: above the previous bound, up to and including its own."""
        self.sum = 0.0
        self.created_s = time.time()

    def observe(self, value: float) -> None:
        """Record one value; NaN is ignored."""
        if value == value:
            self.counts[bisect_left(self._bounds, value)] += 1
            self.sum += value


class Histogram(Collector):
    """A histogram family with the upper bounds `buckets`, to which infinity is added."""

    def __init__(
        self,
        name: str,
        text: str,
        label_names: Iterable[str],
        *,
        buckets: tuple[float, ...],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._label_names = name, text, tuple(label_names)
        self.bounds = tuple(map(float, buckets))
        """Upper bounds of the buckets, without infinity."""
        self.series: dict[tuple[str, ...], HistogramSeries] = {}
        registry.register(self)

    def labels(self, *values: str) -> HistogramSeries:
        """The series with these label values, made at its first use."""
        return self.series.setdefault(values, HistogramSeries(self.bounds))

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        bounds = [floatToGoString(bound) for bound in (*self.bounds, math.inf)]
        for values, series in self.series.items():
            family.add_metric(values, list(zip(bounds, accumulate(series.counts), strict=True)), series.sum)
            labels = dict(zip(self._label_names, values, strict=True))
            family.add_sample(f"{self._name}_created", labels, series.created_s)
        return [family]
