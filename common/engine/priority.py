"""The order in which waiting sequences get their turn: by priority, then by arrival. Pure functions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from common.engine.sequence import Sequence

T = TypeVar("T")


def goes_first(waiting: Sequence, arriving: Sequence) -> bool:
    """Whether a waiting sequence goes before one whose KV another node sends: it ran before, or has a higher priority,
    or the same priority and arrived no later."""
    if waiting.preemptions:
        return True
    return (waiting.request.priority, waiting.arrival_s) <= (arriving.request.priority, arriving.arrival_s)


def insert_by_priority(queue: deque[T], item: T, priority: Callable[[T], int]) -> None:
    """Insert `item` behind all items whose priority number is at most its own."""
    at = len(queue)
    while at > 0 and priority(queue[at - 1]) > priority(item):
        at -= 1
    queue.insert(at, item)
