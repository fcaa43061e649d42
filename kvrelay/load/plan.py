"""The plan of one load run: what to send where, how fast and how long. Sent to the processes of the run as JSON."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from common.base.errors import ConfigError
from kvrelay.load.jobs import LoadJob, SyntheticPrompts
from kvrelay.load.sessions import Session, session
from kvrelay.load.traces import TRACE_BLOCK, Replay, read_trace


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


MIN_RATE = 1e-6
"""Lowest rate of an open loop: one request in eleven days."""


@dataclass(frozen=True)
class LoadPlan:
    """Everything that the run depends on, except the server."""

    url: str
    model: str
    api_key: str = ""
    chat: bool = False
    concurrency: int = 0
    """Closed loop with this many concurrent requests. 0: open loop, by `rate` or by the trace's times."""
    rate: float = 0.0
    """Open loop: mean arrivals per second."""
    burstiness: float = 1.0
    burst_size: int = 1
    """Open loop: requests that arrive at a time."""
    ramp_from: float | None = None
    """Open loop: the rate at the start, which grows to `rate` within `duration_s`."""
    requests: int = 0
    """Number of requests, or of sessions. 0: until `duration_s`, or the whole trace."""
    duration_s: float = 0.0
    warmup: int = 0
    timeout_s: float = 600.0
    prefixes: int = 8
    prefix_tokens: int = 256
    suffix_tokens: int = 64
    output_tokens: int = 32
    longest_tokens: int = 0
    """Suffixes are between `suffix_tokens` and this long; 0: all have `suffix_tokens`."""
    turns: int = 1
    """Requests of a session; 1: requests are independent."""
    think_s: float = 0.0
    """Mean pause between the turns of a session."""
    tools: bool = False
    """Sessions call tools."""
    vocab_size: int = 32_000
    max_len: int = 0
    """Longer requests of a trace are skipped; 0: no limit."""
    trace: str = ""
    scale: int = 32
    rate_scale: float = 1.0
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    processes: int = 1

    @property
    def sends_chats(self) -> bool:
        return self.chat or self.turns > 1

    def check(self) -> None:
        """Raises: ConfigError for contradictory settings."""
        self._check_pace()
        if self.trace and self.sends_chats:
            raise ConfigError("a trace is replayed with token ids: remove --chat and --turns")
        if self.trace and (self.scale < 1 or TRACE_BLOCK % self.scale):
            raise ConfigError(f"--scale must divide {TRACE_BLOCK}, {self.scale} does not")
        if not self.prefix_tokens + self.suffix_tokens:
            raise ConfigError("the prompt is empty: give --prefix-tokens or --suffix-tokens")
        if 0 < self.longest_tokens < self.suffix_tokens:
            raise ConfigError(f"--longest-tokens is less than --suffix-tokens, {self.suffix_tokens}")
        if self.turns == 1 and (self.tools or self.think_s):
            raise ConfigError("--tools and --think-time are for sessions: give --turns")

    def _check_pace(self) -> None:
        """Raises: ConfigError."""
        if self.rate and self.concurrency:
            raise ConfigError("give --rate (open loop) or --concurrency (closed loop), not both")
        if 0 < self.rate < MIN_RATE:
            raise ConfigError(f"--rate must be at least {MIN_RATE:g}, or 0 for a closed loop")
        if self.rate and self.trace:
            raise ConfigError("a trace has its own arrival times: speed them up with --rate-scale instead of --rate")
        if self.concurrency and self.processes > self.concurrency:
            # A process without a worker would never send its share of the jobs.
            raise ConfigError(
                f"{self.processes} processes cannot share --concurrency {self.concurrency}: use fewer processes"
            )
        if not self.trace and not self.rate and not self.concurrency:
            raise ConfigError("give --rate (open loop) or --concurrency (closed loop)")
        if not self.trace and not self.requests and not self.duration_s:
            raise ConfigError("give --requests or --duration: the run needs an end")
        if not self.rate and (self.burst_size > 1 or self.ramp_from is not None):
            raise ConfigError("--burst-size and --ramp-from are for the open loop: give --rate")
        if self.ramp_from is not None and not self.duration_s:
            raise ConfigError("--ramp-from needs --duration, in which the rate grows to --rate")


class Workload:
    """The jobs of a plan.

    Raises: ConfigError for an unusable trace.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._synthetic = SyntheticPrompts(
            plan.prefixes,
            plan.prefix_tokens,
            plan.suffix_tokens,
            plan.output_tokens,
            plan.vocab_size,
            plan.seed,
            text=plan.sends_chats,
            longest_tokens=plan.longest_tokens,
        )
        self._replay: Replay | None = None
        self.left_out = 0
        """Number of requests of the trace that exceed the model's context."""
        if plan.trace:
            every = read_trace(plan.trace)
            longest = plan.max_len * plan.scale or float("inf")
            fitting = [entry for entry in every if entry.input_tokens + entry.output_tokens < longest]
            self.left_out = len(every) - len(fitting)
            if not fitting:
                raise ConfigError(f"no request of the trace fits into {plan.max_len} tokens; try another --scale")
            self._replay = Replay(fitting, plan.scale, plan.rate_scale, plan.vocab_size, plan.seed)

    @property
    def total(self) -> int | None:
        """Number of requests; None if the run ends by time."""
        jobs = self._total_jobs
        return jobs and jobs * self._plan.turns

    @property
    def _total_jobs(self) -> int | None:
        if self._replay is not None:
            count = len(self._replay.entries)
            return min(count, self._plan.requests or count)
        return self._plan.requests or None

    def jobs(self, process: int = 0) -> Iterator[LoadJob | Session]:
        """The jobs of this process, in order of sending."""
        plan = self._plan
        for number, at_s in self._numbers(process):
            if self._replay is not None:
                job = self._replay.job(number)
                yield job if not plan.concurrency else LoadJob(job.number, job.prompt, job.output_tokens)
            elif plan.turns > 1:
                yield session(self._synthetic, number, plan.turns, plan.think_s, tools=plan.tools, at_s=at_s)
            else:
                yield self._synthetic.job(number, at_s)

    def warm_up(self) -> list[LoadJob]:
        """Jobs sent before the measurement and not counted."""
        return [self._synthetic.job(-1 - number) for number in range(self._plan.warmup)]

    def _numbers(self, process: int) -> Iterator[tuple[int, float | None]]:
        plan = self._plan
        total = self._total_jobs
        numbers = itertools.count() if total is None else iter(range(total))
        times = self._arrivals() if plan.rate else None
        for number in numbers:
            at_s = None if times is None else next(times)
            if plan.duration_s and at_s is not None and at_s > plan.duration_s:
                return
            if number % plan.processes == process:
                yield number, at_s

    def _arrivals(self) -> Iterator[float]:
        plan = self._plan
        return arrivals(
            plan.rate,
            plan.burstiness,
            plan.seed,
            group=plan.burst_size,
            ramp_from=plan.ramp_from,
            ramp_s=plan.duration_s,
        )
