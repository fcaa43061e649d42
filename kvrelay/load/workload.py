"""The jobs of a plan: how many, when each is sent, and which process of the run sends it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from common.base.errors import ConfigError
from kvrelay.load.jobs import LoadJob, synthetic_job
from kvrelay.load.plan import LoadPlan
from kvrelay.load.traces import TraceEntry, read_trace, replayed_job


def arrivals(plan: LoadPlan) -> Iterator[float]:
    """Endless arrival times of an open loop with Gamma-distributed gaps of mean 1 / `rate` and shape `burstiness`.

    Shape 1 is a Poisson process; a lower one is burstier, a higher one more even. `burst_size` requests arrive at a time, at
    the same mean rate. With `ramp_from`, the rate grows linearly from it to `rate` within `duration_s`.
    """
    rng, expected = random.Random(f"{plan.seed} arrivals"), 0.0
    while True:
        expected += plan.burst_size * rng.gammavariate(plan.burstiness, 1.0 / plan.burstiness)
        at_s = expected / plan.rate
        if plan.ramp_from is not None:
            at_s = _ramp_time(expected, plan.ramp_from, plan.rate, plan.duration_s)
        yield from itertools.repeat(at_s, plan.burst_size)


def _ramp_time(expected: float, low: float, high: float, ramp_s: float) -> float:
    """The time at which `expected` requests have arrived on average: the integral of the rate, inverted."""
    in_ramp = (low + high) / 2 * ramp_s
    if expected >= in_ramp:
        return ramp_s + (expected - in_ramp) / high
    slope = (high - low) / ramp_s
    return 2 * expected / (low + math.sqrt(low * low + 2 * slope * expected))


class Workload:
    """The jobs of a plan.

    Raises: ConfigError for an unusable trace.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self._entries: list[TraceEntry] | None = None
        self._num_jobs = plan.requests or None
        self.left_out = 0
        """Number of requests of the trace that exceed the model's context."""
        if plan.trace:
            every = read_trace(plan.trace)
            longest = plan.max_len * plan.scale or float("inf")
            self._entries = [entry for entry in every if entry.input_tokens + entry.output_tokens < longest]
            fitting = len(self._entries)
            if not fitting:
                raise ConfigError(f"no request of the trace fits into {plan.max_len} tokens; try another --scale")
            self.left_out = len(every) - fitting
            self._num_jobs = min(fitting, plan.requests or fitting)
        self.total = self._num_jobs and self._num_jobs * plan.turns
        """Number of requests; None if the run ends by time."""

    def jobs(self, process: int = 0) -> Iterator[LoadJob]:
        """The jobs of this process, in order of sending."""
        plan = self.plan
        numbers = itertools.count() if self._num_jobs is None else range(self._num_jobs)
        times = arrivals(plan) if plan.rate else itertools.repeat(None)
        for number, at_s in zip(numbers, times, strict=False):
            if plan.duration_s and at_s is not None and at_s > plan.duration_s:
                return
            if number % plan.processes == process:
                entries = self._entries
                yield synthetic_job(plan, number, at_s) if entries is None else replayed_job(plan, entries, number)
