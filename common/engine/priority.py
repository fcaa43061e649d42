"""The order in which waiting sequences get their turn: by priority, then by arrival. Pure functions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from common.engine.sequence import Sequence

T = TypeVar("T")


def goes_first(waiting: Sequence, arriving: Sequence) -> bool:
    """Whether a waiting sequence goes before one whose KV another node sends: it has a higher priority, or the same and
    either ran before or arrived no later."""
    ours, theirs = waiting.request.priority, arriving.request.priority
    return ours < theirs or (ours == theirs and (waiting.preemptions > 0 or waiting.arrival_s <= arriving.arrival_s))


def insert_by_priority(queue: deque[T], item: T, priority: Callable[[T], int]) -> None:
    """Insert `item` behind all items whose priority number is at most its own."""
    at = len(queue)
    while at > 0 and priority(queue[at - 1]) > priority(item):
        at -= 1
    queue.insert(at, item)


def insert_preempted(queue: deque[Sequence], seq: Sequence) -> None:
    """Insert a sequence that ran before in front of all whose priority number is at least its own."""
    ahead = (each.request.priority < seq.request.priority for each in queue)
    queue.insert(next((at for at, is_ahead in enumerate(ahead) if not is_ahead), len(queue)), seq)
