"""When requests are sent: rate, burstiness, groups, ramps."""

from __future__ import annotations

import itertools
import statistics

import pytest

from kvrelay.load.arrivals import arrivals


def test_arrivals_have_the_given_rate_and_burstiness() -> None:
    for burstiness in (0.25, 1.0, 16.0):
        times = list(itertools.islice(arrivals(50.0, burstiness, seed=3), 4000))
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
        variation = statistics.stdev(gaps) / statistics.mean(gaps)
        assert variation == pytest.approx(burstiness**-0.5, rel=0.15)


def test_a_burst_arrives_at_once_and_the_mean_rate_stays() -> None:
    times = list(itertools.islice(arrivals(50.0, 1.0, seed=3, group=10), 4000))
    assert all(len(set(times[first : first + 10])) == 1 for first in range(0, 4000, 10))
    assert len(times) / times[-1] == pytest.approx(50, rel=0.15)


def test_a_ramp_grows_linearly_and_then_stays() -> None:
    times = list(
        itertools.takewhile(lambda at_s: at_s < 60.0, arrivals(100.0, 1.0, seed=3, ramp_from=0.0, ramp_s=40.0))
    )
    per_ten = [sum(start <= at_s < start + 10 for at_s in times) for start in range(0, 60, 10)]
    for count, expected in zip(per_ten, (125, 375, 625, 875, 1000, 1000), strict=True):
        assert count == pytest.approx(expected, rel=0.2)
