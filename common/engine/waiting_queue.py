"""The order in which waiting sequences get their turn: by priority, by their tenant's share, then by arrival. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import TypeVar

from common.engine.sequence import Sequence
from common.engine.shares import Shares

T = TypeVar("T")


class WaitingQueue:
    """Sequences that wait for a slot and blocks, by priority; equal ones: those that ran before, then by arrival."""

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()
        self._tenants = Counter[str]()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def add(self, seq: Sequence) -> None:
        """Insert a new sequence behind all whose priority number is at most its own."""
        insert_by_priority(self._queue, seq, lambda each: each.request.priority)
        self._tenants[seq.request.tenant] += 1

    def add_preempted(self, seq: Sequence) -> None:
        """Insert a sequence that ran before in front of all whose priority number is at least its own."""
        ahead = takewhile(lambda each: each.request.priority < seq.request.priority, self._queue)
        self._queue.insert(sum(1 for _ in ahead), seq)
        self._tenants[seq.request.tenant] += 1

    def remove(self, seq: Sequence) -> None:
        self._queue.remove(seq)
        self._tenants[seq.request.tenant] -= 1
        if not self._tenants[seq.request.tenant]:
            del self._tenants[seq.request.tenant]

    def next(self, shares: Shares) -> Sequence | None:
        """The sequence whose turn it is; None if none waits."""
        if len(self._tenants) < 2:
            return self._queue[0] if self._queue else None
        urgent = takewhile(lambda each: each.request.priority == self._queue[0].request.priority, self._queue)
        return min(urgent, key=shares.turn)


def goes_first(waiting: Sequence, arriving: Sequence, shares: Shares) -> bool:
    """Whether a waiting sequence goes before one whose KV another node sends: its turn is earlier, or the same and it
    either ran before or arrived no later."""
    ours, theirs = shares.turn(waiting), shares.turn(arriving)
    return ours < theirs or (ours == theirs and (waiting.preemptions > 0 or waiting.arrival_s <= arriving.arrival_s))


def insert_by_priority(queue: deque[T], item: T, priority: Callable[[T], int]) -> None:
    """Insert `item` behind all items whose priority number is at most its own."""
    at = len(queue)
    while at > 0 and priority(queue[at - 1]) > priority(item):
        at -= 1
    queue.insert(at, item)
