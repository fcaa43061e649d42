"""Runs a simulation from its options; called by the command, the benchmarks and the tests. Pure."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from router.simulator.cluster import SimulatedCluster
from router.simulator.events import Events
from router.simulator.hardware import Shape
from router.simulator.report import Ledger, summary
from router.simulator.request import SimRequest
from router.simulator.simulated_router import Admission, SimulatedRouter
from router.simulator.traces import TraceLine
from router.simulator.workload import from_trace, joined, synthetic, turning

_REQUESTS = 10_000
_HALVINGS = 7


@dataclass(frozen=True)
class Simulation:
    """What to simulate. `trace` None: synthetic requests."""

    policy: str = "kv_aware"
    shape: Shape = field(default_factory=Shape)
    trace: Sequence[TraceLine] | None = None
    second: Sequence[TraceLine] | None = None
    """A second trace; the shares of the two turn with `mix_period_s` (`workload.joined`)."""
    second_rate: float | None = None
    """Requests per second of the second trace; None: as many as of the first one, `rate`."""
    requests: int | None = None
    rate_scale: float = 1.0
    rate: float = 4.0
    """Synthetic requests per second, before `rate_scale`."""
    seed: int = 0
    local_prefill_tokens: int | None = None
    slo_ttft_s: float = 2.0
    slo_tpot_s: float = 0.1
    mix_period_s: float | None = None
    """Synthetic requests whose mix turns with this period (`workload.turning`) instead of conversations."""
    admission: Admission | None = None
    """None: every request goes to the nodes at once."""

    @property
    def num_requests(self) -> int:
        """Number of requests, about."""
        return self.requests or (_REQUESTS if self.trace is None else len(self.trace))

    def workload(self) -> Iterator[SimRequest]:
        """The requests, by arrival."""
        rate, block_tokens = self.rate * self.rate_scale, self.shape.block_tokens
        if self.trace is not None and self.second is not None:
            return joined(
                (self.trace, self.second),
                requests=self.num_requests,
                rates=(rate, (self.second_rate or self.rate) * self.rate_scale),
                period_s=self.mix_period_s or math.inf,
                seed=self.seed,
            )
        if self.trace is not None:
            return from_trace(self.trace, requests=self.requests, rate_scale=self.rate_scale, seed=self.seed)
        if self.mix_period_s is not None:
            return turning(self.num_requests, rate, self.mix_period_s, block_tokens, self.seed)
        return synthetic(self.num_requests, rate, block_tokens, self.seed)


@dataclass(frozen=True)
class SimulationOutcome:
    """A run's figures (`report.summary`), and the data that they are computed from."""

    simulation: Simulation
    figures: dict[str, Any]
    ledger: Ledger


Prepare = Callable[[SimulatedCluster, SimulatedRouter, Events], None]


def simulate(
    simulation: Simulation, on_arrival: Callable[[], None] = lambda: None, prepare: Prepare | None = None
) -> SimulationOutcome:
    """Run a simulation to its end; equal simulations have equal outcomes. Raises: ConfigError.

    Calls `on_arrival` for each request, and `prepare` before the first.
    """
    events = Events()
    router = SimulatedRouter(
        simulation.shape,
        events,
        policy=simulation.policy,
        local_prefill_tokens=simulation.local_prefill_tokens,
        admission=simulation.admission,
        seed=simulation.seed,
    )
    cluster = SimulatedCluster(simulation.shape, router, events)
    if prepare is not None:
        prepare(cluster, router, events)
    collects = gc.isenabled()
    gc.disable()  # the collector would scan millions of cached blocks repeatedly and find nothing: requests form no cycles
    try:
        ledger = cluster.run(_reported(simulation.workload(), on_arrival))
    finally:
        if collects:
            gc.enable()
    figures = summary(ledger, slo_ttft_s=simulation.slo_ttft_s, slo_tpot_s=simulation.slo_tpot_s)
    figures |= {"policy": simulation.policy, "rate_scale": simulation.rate_scale, "index_blocks": len(router.index)}
    return SimulationOutcome(simulation, figures, ledger)


def _reported(requests: Iterator[SimRequest], on_arrival: Callable[[], None]) -> Iterator[SimRequest]:
    for request in requests:
        on_arrival()
        yield request


def highest_rate(
    simulation: Simulation, share: float, on_arrival: Callable[[], None] = lambda: None
) -> tuple[float, dict[str, Any]] | None:
    """The highest `rate_scale` at which at least `share` of the requests meet the objectives, to within 4 %, and its figures.

    None if even about a hundredth of the given rate is too much. Calls `on_arrival` for each request of each trial.
    """
    low, high = 0.0, simulation.rate_scale
    best: dict[str, Any] | None = None

    def try_at(scale: float) -> bool:
        nonlocal best, low, high
        figures = simulate(replace(simulation, rate_scale=scale), on_arrival).figures
        if figures["goodput"] >= share:
            best, low = figures, scale
            return True
        high = scale
        return False

    while try_at(high) and low < simulation.rate_scale * 1000:
        high = low * 2
    for _ in range(_HALVINGS):
        if not low:
            try_at(high / 2)
    while low and high / low >= 1.04:
        try_at((low * high) ** 0.5)
    return None if best is None else (low, best)
