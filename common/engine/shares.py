"""How a node's tenants share its sequence slots and KV blocks. Pure.

A tenant's share is the larger of its part of the slots and its part of the blocks (dominant resource fairness). Of equally
urgent sequences, one of the tenant with the smallest share goes first, and it may take the place of one whose tenant keeps at
least as much. Then no other exchange undoes this one, so that sequences are not preempted back and forth.

    Source: A. Ghodsi et al., Dominant Resource Fairness, 2011.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from common.base.hashing import BLOCK_SIZE
from common.engine.sequence import Sequence
from common.kv.rank_layout import blocks_for


class Shares:
    """What each tenant has. Invariant: it counts the sequences that hold blocks."""

    def __init__(self, num_slots: int, num_blocks: int) -> None:
        """`num_slots`, `num_blocks`: the node's sequence slots, and its blocks of one table."""
        self._num_slots, self._num_blocks = num_slots, num_blocks
        self._slots, self._blocks = Counter[str](), Counter[str]()

    def add(self, seq: Sequence) -> None:
        """A sequence got its blocks."""
        self._slots[seq.request.tenant] += 1
        self._blocks[seq.request.tenant] += seq.blocks.num_slots // BLOCK_SIZE

    def grow(self, seq: Sequence) -> None:
        """It got one more block in each table."""
        self._blocks[seq.request.tenant] += 1

    def remove(self, seq: Sequence) -> None:
        """It gives its blocks back."""
        tenant = seq.request.tenant
        self._slots[tenant] -= 1
        self._blocks[tenant] -= seq.blocks.num_slots // BLOCK_SIZE
        if not self._slots[tenant]:
            del self._slots[tenant], self._blocks[tenant]

    def has_others(self, tenant: str) -> bool:
        """Whether another tenant has anything."""
        return len(self._slots) > (tenant in self._slots)

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Assert that it counts these sequences."""
        counted = Shares(self._num_slots, self._num_blocks)
        for seq in holders:
            counted.add(seq)
        assert (self._slots, self._blocks) == (counted._slots, counted._blocks), "the shares are of other sequences"

    def turn(self, seq: Sequence) -> tuple[int, float]:
        """Sequences with lower values go first: by priority, then by their tenant's share."""
        return seq.request.priority, self._share(seq.request.tenant)

    def victim(self, seq: Sequence, candidates: Iterable[Sequence]) -> Sequence | None:
        """The sequence that gives its place to `seq`: of the tenant with the largest share, the first of `candidates`. None if
        that tenant would then have less than the one of `seq`.
        """
        able = [each for each in candidates if each.request.priority >= seq.request.priority]
        victim = max(able, key=lambda each: self._share(each.request.tenant), default=None)
        if victim is None:
            return None
        kept = self._share(victim.request.tenant, -1, -(victim.blocks.num_slots // BLOCK_SIZE))
        return victim if self._share(seq.request.tenant, 1, blocks_for(seq.num_tokens)) <= kept else None

    def _share(self, tenant: str, more_slots: int = 0, more_blocks: int = 0) -> float:
        slots, blocks = self._slots[tenant] + more_slots, self._blocks[tenant] + more_blocks
        return max(slots / self._num_slots, blocks / self._num_blocks)
