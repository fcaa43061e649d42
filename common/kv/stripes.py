"""Which rank of a context-parallel group holds which block. Pure, no torch.

The group's N ranks share the blocks of every sequence: block i of a sequence is on rank i % N. Its number b in the node's block
pool says the same, b % N, and on that rank it is block b // N of the KV memory. So a sequence's position i always has a block
with b % N == i % N, and the pool keeps blocks of different ranks apart (`common.kv.pool`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_CP_SIZE = 64


@dataclass(frozen=True)
class Stripe:
    """Positions `first`, `first + step`, ... of a sequence's blocks."""

    first: int = 0
    step: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.first < self.step, self

    def owns(self, block: int) -> bool:
        """Whether a position, or a block of the node's pool, is in this stripe."""
        return block % self.step == self.first

    def local(self, block: int) -> int:
        """Where a rank with this stripe has an owned block of the node's pool."""
        return block // self.step

    def count(self, num_blocks: int) -> int:
        """How many of the first `num_blocks` positions are in this stripe."""
        return max(0, (num_blocks - self.first + self.step - 1) // self.step)

    @property
    def indices(self) -> slice:
        """Selects the stripe from a list of all positions."""
        return slice(self.first, None, self.step)

    def overlap(self, other: Stripe) -> Stripe | None:
        """The positions that are in both."""
        step = math.lcm(self.step, other.step)
        first = next((i for i in range(self.first, step, self.step) if other.owns(i)), None)
        return None if first is None else Stripe(first, step)


WHOLE = Stripe()
"""All positions."""
