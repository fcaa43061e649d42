"""Transfers over all ranks of a node, as its leader sees them.

The leader's core calls `NodeTransfers`, which turns each call into an order for the transfer end of every rank: the leader's
own, and over their links those of the others. An attempt is received when every rank has all its slices, and released
when every rank has released it; the first failure of any rank fails it for all.

The methods are called by the engine's thread; events come from transfer threads and the links' thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.base.errors import TransferError
from common.control.messages import AttemptKey, Grant, PeerRef
from common.engine.kv_transfer import (
    AbortOrder,
    DestinationReleased,
    DisconnectOrder,
    GrantOrder,
    OnTransferEvent,
    OpenDestinationOrder,
    Opened,
    OpenSourceOrder,
    Received,
    ReceiveFailed,
    SourceReleased,
    Traffic,
    TransferEnd,
    TransferEvent,
    TransferOrder,
    TransferPlan,
)
from common.kv.rank_layout import KVLayout

MAX_PAIRS = 4096
"""A node remembers the traffic of this many pairs of ranks, the most recently used ones."""


@dataclass
class _Reports:
    """The sum of what the ranks have reported about one attempt."""

    peer: tuple[str, str] = ("", "")
    """The other node and its incarnation."""
    opened: int = 0
    received: int = 0
    released: int = 0
    size_bytes: int = 0
    error: Exception | None = None
    failed: bool = False
    traffic: list[Traffic] = field(default_factory=list[Traffic])
    layers: dict[int, float] = field(default_factory=dict[int, float])
    """Layer -> seconds until all ranks had it, with a timeline."""


class NodeTransfers:
    """The transfers of a node, in both directions. Reports each event once for all ranks."""

    def __init__(
        self,
        world_size: int,
        broadcast: Callable[[TransferOrder], None],
        on_event: OnTransferEvent,
        make_end: Callable[[OnTransferEvent], TransferEnd],
    ) -> None:
        """broadcast: sends an order to every other rank. make_end: makes the end of the leader's own rank."""
        self._world_size = world_size
        self._broadcast = broadcast
        self._on_event = on_event
        self._lock = threading.Lock()
        self._open: dict[AttemptKey, _Reports] = {}
        self._traffic: dict[tuple[str, str, str, int, int, str], dict[str, Any]] = {}
        """What each pair of ranks has moved over a transport since this node started, the most recently used last."""
        self.end = make_end(self.on_event)
        """The end of the leader's own rank."""

    def open_source(self, plan: TransferPlan, final_blocks: int = 0) -> None:
        """Prepare to send: see `OpenSourceOrder`. Raises: TransferError if it is open already; then no rank was told."""
        self._begin(plan.key, _Reports())
        self._apply(OpenSourceOrder(plan, final_blocks))

    def grant(self, grant: Grant) -> None:
        """Send: see `GrantOrder`."""
        with self._lock:
            if reports := self._open.get(grant.key):
                reports.peer = (grant.dst.node_id, grant.dst.incarnation)
        self._apply(GrantOrder(grant))

    def open_destination(
        self, plan: TransferPlan, src: PeerRef, src_layout: KVLayout, *, timeline: bool = False
    ) -> bool:
        """Receive: see `OpenDestinationOrder`. Returns whether the grant may go out at once. If not, `Opened` will follow:
        a slice must not reach a rank that does not expect it yet.

        Raises: TransferError if it is open already; then no rank was told.
        """
        self._begin(plan.key, _Reports((src.node_id, src.incarnation)))
        self._apply(OpenDestinationOrder(plan, src, src_layout, timeline))
        return self._world_size == 1

    def abort(self, key: AttemptKey) -> None:
        """Stop a transfer of either direction: see `AbortOrder`."""
        self._apply(AbortOrder(key))

    def disconnect(self, incarnation: str) -> None:
        """End the connections to an unreachable node: see `DisconnectOrder`."""
        self._apply(DisconnectOrder(incarnation))

    def describe(self) -> list[dict[str, Any]]:
        """The bytes moved, by pair of ranks and transport, as plain data for the admin port."""
        with self._lock:
            return list(self._traffic.values())

    def close(self) -> None:
        """Close the end of the leader's own rank."""
        self.end.close()

    def on_event(self, event: TransferEvent) -> None:
        """Take an event of one rank's end; the node's own event follows when all ranks have reported. Any thread."""
        with self._lock:
            of_node, abort = self._gather(event)
        if of_node is not None:
            self._on_event(of_node)
        elif abort:
            self.abort(event.key)

    def _begin(self, key: AttemptKey, reports: _Reports) -> None:
        with self._lock:
            if key in self._open:
                raise TransferError(f"cannot open {key}: it is open already")
            self._open[key] = reports

    def _apply(self, order: TransferOrder) -> None:
        self.end.apply(order)
        self._broadcast(order)

    def _gather(self, event: TransferEvent) -> tuple[TransferEvent | None, bool]:
        """The node's event, if this one completes it, and whether the other ranks must abort the attempt."""
        reports, everyone = self._open[event.key], self._world_size
        match event:
            case Opened():
                reports.opened += 1
                return event if reports.opened == everyone > 1 else None, False
            case Received(key, bytes_received, traffic, layers):
                reports.received += 1
                reports.size_bytes += bytes_received
                reports.traffic += traffic
                for layer, after_s in layers:
                    reports.layers[layer] = max(after_s, reports.layers.get(layer, 0.0))
                if reports.received < everyone:
                    return None, False
                self._count("from", reports)
                of_node = Received(key, reports.size_bytes, tuple(reports.traffic), tuple(reports.layers.items()))
                return of_node, False
            case ReceiveFailed():
                first, reports.failed = not reports.failed, True
                return event if first else None, False
            case DestinationReleased(key):
                return event if self._released(key, reports) else None, False
            case SourceReleased(key, bytes_sent, error, traffic):
                reports.size_bytes += bytes_sent
                reports.traffic += traffic
                first = reports.error is None and error is not None
                reports.error = reports.error or error
                if not self._released(key, reports):
                    return None, first
                self._count("to", reports)
                return SourceReleased(key, reports.size_bytes, reports.error, tuple(reports.traffic)), False

    def _released(self, key: AttemptKey, reports: _Reports) -> bool:
        """Count the release of one rank; the last one ends the attempt."""
        reports.released += 1
        if reports.released < self._world_size:
            return False
        del self._open[key]
        return True

    def _count(self, direction: str, reports: _Reports) -> None:
        """Add the traffic of one attempt, which has ended, "to" or "from" the other node."""
        for moved in reports.traffic:
            route = (direction, *reports.peer, moved.rank, moved.peer_rank, moved.transport)
            before = self._traffic.pop(route, {"bytes": 0, "transfers": 0})
            self._traffic[route] = {
                "peer": reports.peer[0],
                "ranks": f"{moved.rank} {direction} {moved.peer_rank}",
                "transport": moved.transport,
                "why": moved.why or "the sending node chose it",
                "bytes": before["bytes"] + moved.size_bytes,
                "transfers": before["transfers"] + 1,
                "incarnation": reports.peer[1],
            }
            if len(self._traffic) > MAX_PAIRS:
                del self._traffic[next(iter(self._traffic))]
