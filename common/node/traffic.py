"""Bytes that a node's transfers moved, by pair of ranks and transport: for its log, metrics and admin port.

Each rank reports its traffic with its transfer events; the leader's `TrafficLog` adds it up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from common.engine.kv_transfer import Traffic

MAX_PAIRS = 4096


@dataclass(frozen=True)
class PairTraffic:
    """Traffic of one pair of ranks since this node started. `direction` is "to" or "from" the peer."""

    direction: str
    peer: str
    peer_incarnation: str
    rank: int
    peer_rank: int
    transport: str
    why: str
    size_bytes: int = 0
    transfers: int = 0


class TrafficLog:
    """The traffic of one node: its latest `MAX_PAIRS` pairs of ranks. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pairs: dict[tuple[str, str, str, int, int, str], PairTraffic] = {}

    def add(self, direction: str, peer: str, incarnation: str, traffic: Iterable[Traffic]) -> None:
        """Add the traffic of one attempt, which has ended, "to" or "from" node `peer`."""
        with self._lock:
            for moved in traffic:
                route = (direction, peer, incarnation, moved.rank, moved.peer_rank, moved.transport)
                pair = self._pairs.pop(route, None) or PairTraffic(*route, moved.why)
                self._pairs[route] = replace(
                    pair,
                    why=moved.why,
                    size_bytes=pair.size_bytes + moved.size_bytes,
                    transfers=pair.transfers + 1,
                )
                if len(self._pairs) > MAX_PAIRS:
                    del self._pairs[next(iter(self._pairs))]

    @property
    def pairs(self) -> list[PairTraffic]:
        """The pairs, the most recently used last."""
        with self._lock:
            return list(self._pairs.values())

    def describe(self) -> list[dict[str, Any]]:
        """The pairs as plain data, for the admin port."""
        return [
            {
                "peer": pair.peer,
                "ranks": f"{pair.rank} {pair.direction} {pair.peer_rank}",
                "transport": pair.transport,
                "why": pair.why or "the sending node chose it",
                "bytes": pair.size_bytes,
                "transfers": pair.transfers,
                "incarnation": pair.peer_incarnation,
            }
            for pair in self.pairs
        ]


def count_bytes(into: dict[str, int], traffic: Iterable[Traffic]) -> None:
    """Add bytes to counters by transport."""
    for moved in traffic:
        into[moved.transport] = into.get(moved.transport, 0) + moved.size_bytes
