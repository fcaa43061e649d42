"""What the dashboard's pages show each second: one JSON snapshot of the router, made only while a page asks for it.

All pages share one snapshot, built at most once per `INTERVAL_S`. Rates are differences to an earlier snapshot. Router process,
event loop.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from common.base.clock import Clock, monotonic
from common.cluster.membership import Directory
from router.admin import node_state
from router.counters import Counter, Histogram
from router.nodes.node import Node
from router.planner.loop import PlannerLoop
from router.router import Router

INTERVAL_S = 0.9
"""Pages ask once per second."""
_RATE_S = 5.0
"""Rates are means over about this time."""
_FORGOTTEN_S = 15.0
"""Older counters give no rate: no page was open meanwhile."""


class Snapshot(NamedTuple):
    """A snapshot as it is sent."""

    body: bytes
    etag: str


class _Counters(NamedTuple):
    """Relayed bytes at a time, by (prefill incarnation, decode incarnation)."""

    time_s: float
    relayed: dict[tuple[str, str], int]


class Snapshots:
    """Builds the snapshots of one router."""

    def __init__(
        self, router: Router, directory: Directory | None, clock: Clock = monotonic, planner: PlannerLoop | None = None
    ) -> None:
        self._router = router
        self._planner = planner
        self._directory = directory
        self._clock = clock
        self._built_s = -INTERVAL_S
        self._latest = Snapshot(b"", "")
        self._earlier: deque[_Counters] = deque()

    def latest(self) -> Snapshot:
        """A snapshot that is at most `INTERVAL_S` old."""
        now_s = self._clock()
        if now_s - self._built_s >= INTERVAL_S or not self._latest.body:
            body = json.dumps(self._build(now_s), separators=(",", ":")).encode()
            self._latest = Snapshot(body, f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"')
            self._built_s = now_s
        return self._latest

    def _build(self, now_s: float) -> dict[str, Any]:
        dispatcher = self._router.dispatcher
        nodes = sorted(dispatcher.nodes.known(), key=lambda node: (node.record.role, node.node_id))
        return {
            "cluster": self._router.cluster,
            "policy": dispatcher.config.policy,
            "models": [model.name for model in self._router.catalog.models],
            "redis": self._router.degraded(self._directory) or "ok",
            "lease_s": dispatcher.config.lease_s,
            "objectives": dispatcher.objectives.shown(),
            "running": dispatcher.running,
            "waiting": dispatcher.waiting,
            "held": dispatcher.queued,
            "nodes": [self._node(node, now_s) for node in nodes],
            "relays": self._relays(nodes, now_s),
            "totals": totals(self._router, nodes),
            "plan": None if self._planner is None else self._planner.shown(),
        }

    def _node(self, node: Node, now_s: float) -> dict[str, Any]:
        load, layout = node.load, node.record.layout
        quiet_s = None if node.last_pong_s is None else now_s - node.last_pong_s
        breaker = self._router.dispatcher.breakers.view(node.incarnation)
        return {
            "id": node.node_id,
            "incarnation": node.incarnation,
            "role": node.record.role,
            "state": node_state(node),
            "model": node.record.model.name,
            "tp": layout.tp_size,
            "dp": layout.dp_size,
            "ranks": layout.world_size,
            "pp": len(layout.pp_layers),
            "slots": node.record.max_num_seqs,
            "breaker": breaker.state,
            "lease_late": quiet_s is None or quiet_s > self._router.dispatcher.config.lease_s / 2,
            "legs": len(node.legs),
            "running": load.running,
            "waiting": load.waiting,
            "queued_tokens": load.queued_tokens,
            "kv_used": load.kv_blocks_used,
            "kv_cached": load.kv_blocks_cached,
            "kv_total": load.kv_blocks_total or node.record.kv_blocks_total,
            "step_ms": round(1e3 * load.step_s, 2),
            "draining": load.draining,
        }

    def _relays(self, nodes: Collection[Node], now_s: float) -> list[dict[str, Any]]:
        """Bytes relayed so far, and per second, by pair of present nodes."""
        known = {node.incarnation for node in nodes}
        found = {
            (source, node.incarnation): size_bytes
            for node in nodes
            for source, size_bytes in node.relayed_from.items()
            if source in known
        }
        earlier = self._earlier
        while len(earlier) > 1 and now_s - earlier[1].time_s >= _RATE_S:
            earlier.popleft()
        if earlier and now_s - earlier[-1].time_s > _FORGOTTEN_S:
            earlier.clear()
        since = earlier[0] if earlier else _Counters(now_s, {})
        earlier.append(_Counters(now_s, found))
        return [
            {
                "src": source,
                "dst": target,
                "bytes": size_bytes,
                "per_s": _rate(size_bytes, since.relayed.get((source, target), 0), now_s - since.time_s),
            }
            for (source, target), size_bytes in found.items()
        ]


def totals(router: Router, nodes: Iterable[Node]) -> dict[str, Any]:
    """Counters and histograms since the router began, over all models: pages draw their differences."""
    metrics = router.metrics
    loads = [node.load for node in nodes]
    return {
        "ttft": _histogram(metrics.ttft),
        "itl": _histogram(metrics.itl),
        "answered": _counter(metrics.success),
        "failed": _counter(metrics.failed),
        "prompt_tokens": _counter(metrics.prompt_tokens),
        "generated_tokens": _counter(metrics.generated),
        "attempts": {mode: series.value for mode, series in metrics.attempts_by_mode.items()},
        "retries": metrics.retries.value,
        "relayed_bytes": metrics.relayed.value,
        "prefix_queries": sum(load.prefix_queries for load in loads),
        "prefix_hits": sum(load.prefix_hits for load in loads),
    }


def _rate(now: int, before: int, seconds: float) -> int:
    return round(max(0, now - before) / seconds) if seconds > 0 else 0


def _counter(counter: Counter) -> float:
    return sum(series.value for series in counter.series.values())


def _histogram(histogram: Histogram) -> Mapping[str, Any]:
    series = list(histogram.series.values())
    counts = [sum(column) for column in zip(*(each.counts for each in series), strict=True)] if series else []
    return {"bounds": histogram.bounds, "counts": counts, "sum": sum(each.sum for each in series)}
