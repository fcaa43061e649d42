"""What a node's transfers moved, between which ranks, over what and why: for its log, metrics and admin port.

The ends of each rank report it with their events; the leader's `TrafficLog` adds it up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from common.control.messages import AttemptKey
from common.engine.kv_transfer import Traffic

MAX_PAIRS = 4096


@dataclass(frozen=True)
class PairTraffic:
    """One pair of ranks, since this node began. `direction` is "to" or "from" the peer."""

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
    """The pairs of one node, the latest `MAX_PAIRS`. For any thread."""

    def __init__(self, direction: str) -> None:
        self._direction = direction
        self._lock = threading.Lock()
        self._pairs: dict[tuple[str, str, int, int, str], PairTraffic] = {}

    def add(self, peer: str, incarnation: str, traffic: Iterable[Traffic]) -> None:
        """One attempt with node `peer` is over."""
        with self._lock:
            for moved in traffic:
                place = (peer, incarnation, moved.rank, moved.peer_rank, moved.transport)
                pair = self._pairs.pop(place, None) or PairTraffic(self._direction, *place, moved.why)
                self._pairs[place] = replace(
                    pair,
                    why=moved.why,
                    size_bytes=pair.size_bytes + moved.size_bytes,
                    transfers=pair.transfers + 1,
                )
                if len(self._pairs) > MAX_PAIRS:
                    del self._pairs[next(iter(self._pairs))]

    @property
    def pairs(self) -> list[PairTraffic]:
        """The pair that moved something last comes last."""
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
    """Add to counters by transport."""
    for moved in traffic:
        into[moved.transport] = into.get(moved.transport, 0) + moved.size_bytes


class Tally:
    """Bytes of the attempts under way at one end of one rank; owned by its I/O thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._open: dict[AttemptKey, dict[tuple[int, str, str], int]] = {}

    def add(self, key: AttemptKey, peer_rank: int, transport: str, why: str, size_bytes: int) -> None:
        """One message of attempt `key`."""
        moved, way = self._open.setdefault(key, {}), (peer_rank, transport, why)
        moved[way] = moved.get(way, 0) + size_bytes

    def take(self, key: AttemptKey) -> tuple[Traffic, ...]:
        """What attempt `key` moved; it is over."""
        moved = self._open.pop(key, {})
        return tuple(Traffic(self._rank, *way, size) for way, size in moved.items())
