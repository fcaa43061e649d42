"""Received KV that waits for the steps with which the first rank of each stage hands it on to the others. Pure, no torch.

Beside running streams a step hands on a bounded number of blocks, so that the KV of a long context delays each of their tokens by
a bounded time. A sequence joins the step that hands on its last block. The queue holds at most the
node's attempts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from common.control.messages import AttemptKey
from common.engine.step import HandedOn
from common.kv.rank_layout import KVLayout

MOST_BLOCKS = 128
"""Blocks that a step hands on beside running streams: 2,048 tokens."""


def received_once(layout: KVLayout, src: KVLayout, blocks: Sequence[list[int]]) -> list[HandedOn]:
    """What only the first rank of each stage has received from a node with the layout `src`. blocks: received, of each block table."""
    return [HandedOn(number, blocks[layout.spec.groups[number].table]) for number in layout.handed_on(src)]


class HandOnQueue:
    """Blocks by attempt, the oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[AttemptKey, deque[HandedOn]] = {}

    def __contains__(self, key: AttemptKey) -> bool:
        """Whether some of its blocks wait."""
        return key in self._waiting

    def __len__(self) -> int:
        """Attempts that wait."""
        return len(self._waiting)

    def add(self, key: AttemptKey, received: Sequence[HandedOn]) -> None:
        """What an attempt has received, whole."""
        parts = deque(part for part in received if part.blocks)
        if parts:
            self._waiting[key] = parts

    def drop(self, key: AttemptKey) -> None:
        """An attempt has ended."""
        self._waiting.pop(key, None)

    def take(self, most: int | None) -> tuple[list[HandedOn], list[AttemptKey]]:
        """At most `most` blocks, None: all; and the attempts of which none is left."""
        taken: list[HandedOn] = []
        complete: list[AttemptKey] = []
        left = most
        for key, parts in self._waiting.items():
            while parts and left != 0:
                group, blocks = parts.popleft()
                taken.append(HandedOn(group, blocks[:left]))
                if left is not None:
                    if blocks[left:]:
                        parts.appendleft(HandedOn(group, blocks[left:]))
                    left -= len(blocks[:left])
            if not parts:
                complete.append(key)
        for key in complete:
            del self._waiting[key]
        return taken, complete
