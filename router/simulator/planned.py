"""A simulated cluster whose shape a planner changes while it runs: that of routers, or one that knows what will arrive. Pure.

What a change costs is simulated: a node that leaves first finishes its requests, and a new one takes requests only after a
start-up delay, in the place of one that has left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from common.base.errors import ConfigError
from common.control.messages import Role
from router.planner.demand import DemandMeter, Sample, decode_slots
from router.planner.plan import Observed, PlanMemory, ShapeDecision, plan
from router.planner.sizing import Demand, NodeCounts, RoleCosts
from router.requests.admission import Objectives
from router.simulator.cluster import SimulatedCluster
from router.simulator.events import Events
from router.simulator.node import SimulatedNode
from router.simulator.report import spread
from router.simulator.request import SimRequest
from router.simulator.run import Simulation, SimulationOutcome, simulate
from router.simulator.simulated_router import SimulatedRouter

_TICK_S = 10.0
_FINE = 40
"""The smallest step between fixed splits is the number of all nodes divided by this, and at least one."""
_AHEAD_S = 600.0
"""How far ahead foresight knows what arrives."""
_HOUR_S = 3600.0
_NONE = np.zeros(0)


class Planned:
    """The planner that routers run. `changes`: the time and the decision of each change."""

    def __init__(self, objectives: Objectives) -> None:
        self._objectives = objectives
        self._memory = PlanMemory()
        self.changes: list[tuple[float, ShapeDecision]] = []

    def decide(self, observed: Observed) -> NodeCounts:
        """What the cluster is to have now, by `router.planner.plan.plan`."""
        decision = plan(observed, self._objectives, None, self._memory)
        self._memory = decision.memory
        if decision.counts != observed.wanted:
            self.changes.append((observed.now_s, decision))
        return decision.counts


class Foresight(Planned):
    """The planner, told what arrives in the next ten minutes and what nodes cost. No upper bound: its rules are the same."""

    def __init__(
        self, objectives: Objectives, costs: RoleCosts, requests: Iterator[SimRequest], computed_share: float
    ) -> None:
        """`costs`: those of an earlier run; `computed_share`: the share of its prompt tokens that were not cached."""
        arrivals = [(each.arrival_s, each.input_tokens, each.output_tokens) for each in requests]
        self._times_s = [each[0] for each in arrivals]
        self._prompt_tokens = list(accumulate((each[1] * computed_share for each in arrivals), initial=0.0))
        self._output_tokens = list(accumulate((each[2] for each in arrivals), initial=0))
        super().__init__(objectives)
        self._costs = costs

    def decide(self, observed: Observed) -> NodeCounts:
        """Decide as the planner does, from the demand of the next ten minutes instead of the last ones."""
        first, last = (bisect_left(self._times_s, observed.now_s + ahead_s) for ahead_s in (0.0, _AHEAD_S))
        prompts = self._prompt_tokens[last] - self._prompt_tokens[first]
        outputs = self._output_tokens[last] - self._output_tokens[first]
        demand = Demand(_AHEAD_S, prompts / _AHEAD_S, outputs / _AHEAD_S)
        return super().decide(replace(observed, demand=demand, costs=self._costs))


class ShapeKeeper:
    """Asks the planner every ten seconds and changes the cluster accordingly. The cluster never has more nodes than at first."""

    def __init__(self, planner: Planned, start_s: float) -> None:
        """`start_s`: seconds until a new node takes requests."""
        self._planner = planner
        self._start_s = start_s
        self._meter = DemandMeter()
        self._leaving: list[SimulatedNode] = []
        self._starting = Counter[Role]()
        self.costs: RoleCosts | None = None
        """The latest costs that were observed."""

    def watch(self, cluster: SimulatedCluster, router: SimulatedRouter, events: Events) -> None:
        """Begin; before the cluster runs."""
        self._cluster, self._router, self._events = cluster, router, events
        self._wanted = self._usable
        self._places = self._wanted.total
        events.after(_TICK_S, self._tick)

    def _tick(self, _: None) -> None:
        if self._cluster.all_arrived:
            return  # the last answers say nothing about the load
        self._events.after(_TICK_S, self._tick)
        self._wanted = self._planner.decide(self._observe())
        self._change()

    @property
    def _usable(self) -> NodeCounts:
        return NodeCounts(**{role: len(nodes) for role, nodes in self._cluster.nodes.items()})

    def _observe(self) -> Observed:
        cluster, now_s = self._cluster, self._events.now_s
        nodes = [*cluster.nodes["prefill"], *cluster.nodes["decode"]]
        samples = [Sample(node.role, node.node_id, node.load()) for node in nodes]
        self._meter.add(now_s, samples)
        of_decode = [sample.load for sample in samples if sample.role == "decode"]
        slots = decode_slots(of_decode, cluster.shape.hardware.max_num_seqs)
        prefill, decode = self._router.costs
        self.costs = RoleCosts(replace(prefill), replace(decode), slots)
        return Observed(now_s, self._wanted, self._usable, self._meter.demand(decode.output_tokens), self.costs)

    def _change(self) -> None:
        """Retire surplus nodes and start missing ones, as far as there is room."""
        cluster, starting = self._cluster, self._starting
        self._leaving = [node for node in self._leaving if not node.load().idle]
        missing: dict[Role, int] = {
            role: getattr(self._wanted, role) - len(nodes) - starting[role] for role, nodes in cluster.nodes.items()
        }
        for role, count in missing.items():
            for _ in range(-count):
                if len(cluster.nodes[role]) > 1:
                    self._leaving.append(cluster.retire(role))
        room = self._places - self._usable.total - len(self._leaving) - starting.total()
        for role, count in missing.items():
            for _ in range(min(count, room)):
                room -= 1
                starting[role] += 1
                self._events.after(self._start_s, self._started, role)

    def _started(self, role: Role) -> None:
        self._starting[role] -= 1
        self._cluster.add(role)


@dataclass(frozen=True)
class Comparison:
    """Figures (`report.summary` and `shape`) of the same requests served by clusters of equal size and different shapes."""

    fixed: list[dict[str, Any]]
    """One per split that was tried, by prefill nodes."""
    planned: dict[str, Any]
    foresight: dict[str, Any]
    changes: Sequence[tuple[float, ShapeDecision]]
    """What the planner changed."""

    @property
    def best(self) -> dict[str, Any]:
        """The fixed split with the most good requests."""
        return max(self.fixed, key=lambda figures: figures["goodput"])

    @property
    def hindsight(self) -> dict[str, Any]:
        """For the requests of each hour the fixed split that served most of them well, chosen afterwards.

        No change costs anything, and no hour begins with another split's queue: of the splits tried, no shape that stays for at
        least an hour does better.
        """
        best, hours = self.best, max(len(figures["good_by_hour"]) for figures in self.fixed)
        by_hour = np.zeros((len(self.fixed), hours))
        for row, figures in zip(by_hour, self.fixed, strict=True):
            row[: len(figures["good_by_hour"])] = figures["good_by_hour"]
        good = float(by_hour.max(axis=0).sum())
        factor = good / max(1.0, sum(best["good_by_hour"]))
        scaled = {name: best[name] * factor for name in ("goodput", "good_rate", "good_per_node_hour")}
        return {"shape": "best split of each hour", **scaled, "ttft_s": spread(_NONE), "tpot_s": spread(_NONE)}


def compare_shapes(simulation: Simulation, start_s: float) -> Comparison:
    """Serve the requests with the planner, with foresight, and with fixed splits of as many nodes, up to the best of these.

    `start_s`: seconds until a new node of the planner's takes requests. Raises: ConfigError.
    """
    objectives = Objectives(simulation.slo_ttft_s, simulation.slo_tpot_s)
    planned = Planned(objectives)
    keeper = ShapeKeeper(planned, start_s)
    with_planner = _figures("planned", simulate(simulation, prepare=keeper.watch))
    if keeper.costs is None:
        raise ConfigError(f"--planner needs requests that arrive over more than {_TICK_S:g} s: it decides that often")
    seer = Foresight(objectives, keeper.costs, simulation.workload(), 1 - with_planner["hit_rate"])
    foresight = _figures("foresight", simulate(simulation, prepare=ShapeKeeper(seer, 0.0).watch))
    return Comparison(_fixed_splits(simulation), with_planner, foresight, planned.changes)


def _fixed_splits(simulation: Simulation) -> list[dict[str, Any]]:
    """Try fixed splits from the given one on, towards better ones, in steps that get smaller."""
    shape = simulation.shape
    total, best = shape.prefill + shape.decode, shape.prefill
    tried: dict[int, dict[str, Any]] = {}

    def goodput(prefill: int) -> float:
        if not 0 < prefill < total:
            return -1.0
        if prefill not in tried:
            split = replace(simulation, shape=replace(shape, prefill=prefill, decode=total - prefill))
            tried[prefill] = _figures(f"{prefill} + {total - prefill}", simulate(split))
        return tried[prefill]["goodput"]

    step = max(1, total // 8)
    while step > total // _FINE:
        better = max((best, best - step, best + step), key=goodput)
        if better == best:
            step //= 2
        best = better
    return [tried[prefill] for prefill in sorted(tried)]


def _figures(name: str, outcome: SimulationOutcome) -> dict[str, Any]:
    """A run's figures with the shape's name, the good requests of each hour, and those per hour and node."""
    simulation, figures = outcome.simulation, outcome.figures
    per_node_hour = figures["good_rate"] * _HOUR_S / (simulation.shape.prefill + simulation.shape.decode)
    arrived_s = outcome.ledger.good_arrivals(simulation.slo_ttft_s, simulation.slo_tpot_s)
    by_hour = np.bincount((arrived_s // _HOUR_S).astype(np.intp)).tolist()
    return {**figures, "shape": name, "good_per_node_hour": per_node_hour, "good_by_hour": by_hour}
