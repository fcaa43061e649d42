"""When the requests of an open loop are sent. Pure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator


def arrivals(
    rate: float,
    burstiness: float,
    seed: int,
    *,
    group: int = 1,
    ramp_from: float | None = None,
    ramp_s: float = 0.0,
) -> Iterator[float]:
    """Endless arrival times with Gamma-distributed gaps of mean 1 / `rate` and shape `burstiness`.

    Shape 1 is a Poisson process; a lower one is burstier, a higher one more even. `group` requests arrive at a time, at
    the same mean rate. With `ramp_from`, the rate grows linearly from it to `rate` within `ramp_s` seconds.
    """
    rng, expected = random.Random(f"{seed} arrivals"), 0.0
    while True:
        expected += group * rng.gammavariate(burstiness, 1.0 / burstiness)
        at_s = expected / rate if ramp_from is None else _ramp_time(expected, ramp_from, rate, ramp_s)
        yield from itertools.repeat(at_s, group)


def _ramp_time(expected: float, low: float, high: float, ramp_s: float) -> float:
    """The time at which `expected` requests have arrived on average: the integral of the rate, inverted."""
    in_ramp = (low + high) / 2 * ramp_s
    if expected >= in_ramp:
        return ramp_s + (expected - in_ramp) / high
    slope = (high - low) / ramp_s
    return 2 * expected / (low + math.sqrt(low * low + 2 * slope * expected))
