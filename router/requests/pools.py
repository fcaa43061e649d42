"""The nodes of each pooling model: their fleet, the queue before them and what their work costs. Router, event loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from common.base.clock import Clock
from common.control.messages import NodeLoad
from router.nodes.node import Node
from router.policy import Fleet
from router.policy.costs import CostModel
from router.requests.admission import Objectives
from router.requests.admission_queue import AdmissionQueue

_NO_OBJECTIVES = Objectives()


class Pool(NamedTuple):
    """The nodes of one pooling model."""

    fleet: Fleet
    admission_queue: AdmissionQueue
    costs: CostModel


class Pools:
    """All pooling models by the name under which nodes registered them. `fleets`: as in `router.nodes.fleets`."""

    def __init__(self, fleets: Mapping[str, Fleet], *, max_wait_s: float, clock: Clock) -> None:
        self._fleets = fleets
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._pools: dict[str, Pool] = {}
        self._loads: dict[str, NodeLoad] = {}

    def get(self, model: str) -> Pool:
        """The nodes of a model; without any so far, an empty fleet."""
        pool = self._pools.get(model)
        if pool is None:
            fleet = self._fleets.get(model)
            if fleet is None:
                return self._new(Fleet("prefill"))
            pool = self._pools[model] = self._new(fleet)
        return pool

    def _new(self, fleet: Fleet) -> Pool:
        costs = CostModel()
        fleet.costs = costs.costs
        queue = AdmissionQueue(
            {"prefill": fleet, "decode": Fleet("decode")},
            _NO_OBJECTIVES,
            max_wait_s=self._max_wait_s,
            clock=self._clock,
        )
        return Pool(fleet, queue, costs)

    @property
    def queued(self) -> int:
        """Parts that wait in admission queues."""
        return sum(len(pool.admission_queue) for pool in self._pools.values())

    def load_changed(self, node: Node) -> None:
        """Learn from a pooling node's new load report."""
        load, pool = node.load, self.get(node.record.model.name)
        before = self._loads.get(node.incarnation, load)
        self._loads[node.incarnation] = load
        pool.costs.computed(load.prompt_tokens - before.prompt_tokens, load.prompt_busy_s - before.prompt_busy_s)
        pool.admission_queue.release_soon()

    def release_soon(self) -> None:
        """Release queued parts after the current event."""
        for pool in self._pools.values():
            pool.admission_queue.release_soon()

    def expire(self) -> None:
        """Refuse parts that have waited too long."""
        for pool in self._pools.values():
            pool.admission_queue.expire()

    def keep(self, incarnations: set[str]) -> None:
        """Forget all other nodes."""
        for gone in self._loads.keys() - incarnations:
            del self._loads[gone]
