"""One comparison: serves with every system in turn, in several rounds, and collects the samples of `report`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.machine_best import BestLimits
from bench.peers import goodput, two_hosts
from bench.peers.checkpoints import make_checkpoint
from bench.peers.environments import Unavailable
from bench.peers.goodput import Objectives, Point
from bench.peers.report import OURS, Limits
from bench.peers.rows import ROWS, ROWS_OF_SHAPE, Figures, Probe, warm_up
from bench.peers.systems import KvRelay, System, every_system, vllm_small_steps
from bench.shape import SHAPES, Shape
from bench.worker import PASSIVE, Worker
from rich.console import Console
from rich.markup import escape

GOODPUT = "disaggregation"
_SEED = 20_250_101
_DURATION_S, _QUICK_S = 40.0, 4.0
"""During which requests are sent at one rate."""
_SHOWN = 500


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    cache: Path
    peers: Sequence[str]
    shapes: Sequence[str]
    only: Sequence[str]
    """Rows of the table, and `GOODPUT`."""
    rounds: int = 3
    rates: Sequence[float] = goodput.RATES
    objectives: Objectives = field(default_factory=Objectives)
    quick: bool = False


@dataclass
class Samples:
    """Everything that was measured; by shape, system and round."""

    limits: dict[str, list[Limits]] = field(default_factory=dict[str, list[Limits]])
    figures: dict[str, dict[str, list[Figures]]] = field(default_factory=dict[str, dict[str, list[Figures]]])
    goodput: dict[str, dict[str, list[Point]]] = field(default_factory=dict[str, dict[str, list[Point]]])
    """By placement and system."""
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """System, or system and row, with the reason."""


class Comparison:
    """Runs the measurements that were asked for; what fails is named in `samples.left_out`, the rest goes on."""

    def __init__(self, options: Options, console: Console) -> None:
        self._options = options
        self._console = console
        self.samples = Samples()
        every = every_system(options.cache)
        self.systems: dict[str, System] = {name: s for name, s in every.items() if name in {OURS, *options.peers}}
        self._machine = Worker("bench.machine:Machine", environ=PASSIVE, small=options.quick)
        self.about: dict[str, Any] = self._machine.call("about")

    def close(self) -> None:
        """End the process that measures the limits."""
        self._machine.close()

    def prepare(self) -> None:
        """Make the checkpoints, install the peers and convert for them."""
        self._say("making the checkpoints")
        checkpoints = [self._checkpoint(SHAPES[name]) for name in self._options.shapes]
        for name, system in list(self.systems.items()):
            self._say(f"preparing {system.title}")
            if not self._attempt(name, lambda system=system: system.prepare(checkpoints)):
                del self.systems[name]

    def compare(self) -> None:
        """All rows of all shapes."""
        for name in self._options.shapes:
            rows = [row for row in ROWS_OF_SHAPE[name] if row in self._options.only]
            serving = {key: system for key, system in self.systems.items() if set(rows) & set(system.rows or rows)}
            self.samples.figures[name] = {key: [] for key in serving}
            self.samples.limits[name] = []
            for turn in range(self._options.rounds if rows else 0):
                self._round(turn, SHAPES[name], rows, serving)

    def _round(self, turn: int, shape: Shape, rows: Sequence[str], serving: dict[str, System]) -> None:
        """Every system once, in reversed order in every other round. One that does not serve leaves `serving`."""
        limits = BestLimits(self._machine)
        for key in list(serving) if turn % 2 == 0 else list(reversed(serving)):
            read, product = limits.measure_read(), max(map(limits.measure_gemm, ("bfloat16", "float32")))
            figures: Figures = {}
            self.samples.figures[shape.name][key].append(figures)
            # The same prompts for every system, others in every round.
            rng = random.Random(_SEED + turn)
            if not self._attempt(
                key, lambda key=key, rng=rng, into=figures: self._turn(serving[key], shape, rows, rng, into)
            ):
                del serving[key]
            self.samples.limits[shape.name][turn:] = [Limits(read, product)]

    def _turn(self, system: System, shape: Shape, rows: Sequence[str], rng: random.Random, into: Figures) -> None:
        """One turn of one system; figures go `into` as they come."""
        self._say(f"{shape.name}: {system.title}")
        with system.served(self._checkpoint(shape), self._log(system.name, shape)) as url:
            probe = Probe(url, shape, rng, self._options.quick)
            warm_up(probe)
            for row in [row for row in rows if system.rows is None or row in system.rows]:
                what = f"{system.name}, {shape.name}, {row}"
                self._attempt(what, lambda row=row: into.update(ROWS[row](probe)))

    def judge_disaggregation(self) -> None:
        """Goodput on one shared pair of cores, and on two hosts with a core each."""
        if GOODPUT not in self._options.only:
            return
        shape = SHAPES[min(self._options.shapes, key=lambda name: SHAPES[name].weight_bytes_per_token())]
        checkpoint, logs = self._checkpoint(shape), self._options.cache / "logs" / "two-hosts"
        split, colocated = KvRelay(), KvRelay(prefill=0)
        systems: list[System] = [split, colocated]
        places: dict[str, Callable[[], AbstractContextManager[list[str]]]] = {
            split.name: lambda: two_hosts.kvrelay(checkpoint, ("prefill", "decode"), logs),
            colocated.name: lambda: two_hosts.kvrelay(checkpoint, ("decode", "decode"), logs),
        }
        small_steps = vllm_small_steps(self._options.cache)
        if small_steps.name in self.systems:
            systems.append(small_steps)
            places[small_steps.name] = lambda: two_hosts.vllm(small_steps, checkpoint, logs)
        for system in systems:
            log = self._log(f"goodput-{system.name}", shape)
            self._goodput("shared cores", system, shape, lambda s=system, log=log: _as_list(s.served(checkpoint, log)))
        if (reason := two_hosts.why_not()) is not None:
            self.samples.left_out["two hosts"] = reason
            return
        for system in systems:
            self._goodput("two hosts", system, shape, places[system.name])

    def _goodput(
        self, placement: str, system: System, shape: Shape, served: Callable[[], AbstractContextManager[list[str]]]
    ) -> None:
        options = self._options

        def measure() -> None:
            with served() as urls:
                for url in urls:
                    warm_up(Probe(url, shape, random.Random(_SEED), options.quick))
                duration_s = _QUICK_S if options.quick else _DURATION_S
                points = goodput.measure(system.name, urls, options.rates, duration_s, shape.vocab, options.objectives)
            self.samples.goodput.setdefault(placement, {})[system.name] = points

        self._say(f"goodput, {placement}: {system.title}")
        self._attempt(f"{system.name}, {placement}", measure)

    def _attempt(self, what: str, action: Callable[[], None]) -> bool:
        """Whether it succeeded. What breaks is named with its reason, and costs the others nothing."""
        try:
            action()
        except Exception as error:  # any: the peers' and the client's
            reason = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
            self.samples.left_out[what] = " ".join(reason.split())[:_SHOWN]
            self._say(f"[yellow]{what} is left out:[/yellow] {escape(self.samples.left_out[what])}")
            return False
        return True

    def _checkpoint(self, shape: Shape) -> Path:
        return make_checkpoint(shape, self._options.cache / "models")

    def _log(self, name: str, shape: Shape) -> Path:
        return self._options.cache / "logs" / f"{name}-{shape.name}.log"

    def _say(self, text: str) -> None:
        self._console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {text}", highlight=False)


@contextmanager
def _as_list(served: AbstractContextManager[str]) -> Iterator[list[str]]:
    with served as url:
        yield [url]
