"""The plan of one load run: what to send where, how fast and how long. Sent to the processes of the run as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from common.base.errors import ConfigError
from common.tools.load.jobs import TRACE_BLOCK, Job, Replay, Synthetic, arrivals, read_trace


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
    requests: int = 0
    """0: until `duration_s`, or the whole trace."""
    duration_s: float = 0.0
    warmup: int = 0
    timeout_s: float = 600.0
    prefixes: int = 8
    prefix_tokens: int = 256
    suffix_tokens: int = 64
    output_tokens: int = 32
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

    def check(self) -> None:
        """Raises: ConfigError for contradictory settings."""
        if self.trace and self.chat:
            raise ConfigError("a trace is replayed with token ids: remove --chat")
        if self.rate and self.concurrency:
            raise ConfigError("give --rate (open loop) or --concurrency (closed loop), not both")
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
        if self.trace and (self.scale < 1 or TRACE_BLOCK % self.scale):
            raise ConfigError(f"--scale must divide {TRACE_BLOCK}, {self.scale} does not")
        if not self.prefix_tokens + self.suffix_tokens:
            raise ConfigError("the prompt is empty: give --prefix-tokens or --suffix-tokens")


class Workload:
    """The jobs of a plan.

    Raises: ConfigError for an unusable trace.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._synthetic = Synthetic(
            plan.prefixes,
            plan.prefix_tokens,
            plan.suffix_tokens,
            plan.output_tokens,
            plan.vocab_size,
            plan.seed,
            text=plan.chat,
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
        """Number of jobs; None if the run ends by time."""
        if self._replay is not None:
            count = len(self._replay.entries)
            return min(count, self._plan.requests or count)
        return self._plan.requests or None

    def jobs(self, process: int = 0) -> Iterator[Job]:
        """The jobs of this process, in order of sending."""
        for number, at_s in self._numbers(process):
            if self._replay is not None:
                job = self._replay.job(number)
                yield job if not self._plan.concurrency else Job(job.number, job.prompt, job.output_tokens)
            else:
                yield self._synthetic.job(number, at_s)

    def warm_up(self) -> list[Job]:
        """Jobs sent before the measurement and not counted."""
        return [self._synthetic.job(-1 - number) for number in range(self._plan.warmup)]

    def _numbers(self, process: int) -> Iterator[tuple[int, float | None]]:
        plan = self._plan
        numbers = itertools.count() if self.total is None else iter(range(self.total))
        times = arrivals(plan.rate, plan.burstiness, plan.seed) if plan.rate and not plan.trace else None
        for number in numbers:
            at_s = None if times is None else next(times)
            if plan.duration_s and at_s is not None and at_s > plan.duration_s:
                return
            if number % plan.processes == process:
                yield number, at_s
