"""Which expert lies in which slot of a stage's ranks, and which slots take another one to even out the ranks' load. Pure.

A layer has `experts + redundant` slots, numbered over the ranks of a stage: each rank has a range of them, and each slot holds one
expert. An expert in several slots is replicated: its rows are shared out among them.
Source: DeepSeek's EPLB (github.com/deepseek-ai/EPLB): replicas for the most loaded experts, then greedy packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.model.sharding import even_range

_NEAR = 0.02
"""A rank keeps an expert that it holds if its load is at most this part of the mean above the lowest rank's."""


class Move(NamedTuple):
    """`slot` takes the expert that `source`, a slot of the present placement, holds."""

    slot: int
    source: int


@dataclass(frozen=True)
class Placement:
    """The experts of one layer."""

    num_experts: int
    num_ranks: int
    slots: tuple[int, ...]
    """The expert in each slot. Every expert has at least one, and at most `num_ranks`."""

    @classmethod
    def initial(cls, num_experts: int, num_ranks: int, redundant: int) -> Placement:
        """The experts in their order, then the first ones again in redundant slots."""
        return cls(num_experts, num_ranks, tuple(slot % num_experts for slot in range(num_experts + redundant)))

    def range_of(self, rank: int) -> range:
        """The slots of a rank."""
        return range(*even_range(len(self.slots), self.num_ranks, rank))

    def rank_of(self, slot: int) -> int:
        """The rank that has a slot."""
        return next(rank for rank in range(self.num_ranks) if slot in self.range_of(rank))

    def slots_of_experts(self) -> list[list[int]]:
        """For each expert, its slots in ascending order."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.slots):
            found[expert].append(slot)
        return found

    def by_rank(self) -> list[list[int]]:
        """For each rank, the experts in its slots."""
        return [[self.slots[slot] for slot in self.range_of(rank)] for rank in range(self.num_ranks)]

    def loads(self, counts: Sequence[float]) -> list[float]:
        """The expected load of each rank. counts: rows of each expert."""
        replicas = [len(slots) for slots in self.slots_of_experts()]
        return [sum(counts[expert] / replicas[expert] for expert in experts) for experts in self.by_rank()]

    def balanced(self, counts: Sequence[float]) -> Placement:
        """A placement that evens out the ranks' load, with few moves. counts: rows of each expert."""
        replicas = _replicas(counts, self.num_ranks, len(self.slots))
        present = self.by_rank()
        free = [len(experts) for experts in present]
        loads = [0.0] * self.num_ranks
        near = _NEAR * sum(counts) / self.num_ranks
        placed: list[list[int]] = [[] for _ in present]
        # Replicated experts come first: they need ranks that differ.
        order = sorted(range(self.num_experts), key=lambda e: (replicas[e] == 1, -counts[e] / replicas[e], e))
        for expert in [each for each in order for _ in range(replicas[each])]:
            with_room = [rank for rank in range(self.num_ranks) if free[rank]]
            ranks = [rank for rank in with_room if expert not in placed[rank]] or with_room
            lowest = min(loads[rank] for rank in ranks)
            near_ranks = [rank for rank in ranks if loads[rank] <= lowest + near]
            rank = min(near_ranks, key=lambda rank: (expert not in present[rank], loads[rank], rank))
            placed[rank].append(expert)
            free[rank] -= 1
            loads[rank] += counts[expert] / replicas[expert]
        slots: list[int] = []
        for before, after in zip(present, placed, strict=True):
            slots += _kept_in_place(before, after)
        return Placement(self.num_experts, self.num_ranks, tuple(slots))

    def moves_to(self, other: Placement) -> list[Move]:
        """The slots that take another expert, in ascending order, each with where it is now: on the same rank if it can, else on
        the rank that sends the fewest."""
        holders = self.slots_of_experts()
        sent = [0] * self.num_ranks
        moves: list[Move] = []
        for slot, (before, after) in enumerate(zip(self.slots, other.slots, strict=True)):
            if before == after:
                continue
            rank = self.rank_of(slot)
            source = min(holders[after], key=lambda held: (self.rank_of(held) != rank, sent[self.rank_of(held)], held))
            sent[self.rank_of(source)] += 1
            moves.append(Move(slot, source))
        return moves


def imbalance(loads: Sequence[float]) -> float:
    """The greatest load over the mean; 1 without load."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def _replicas(counts: Sequence[float], num_ranks: int, num_slots: int) -> list[int]:
    """Slots for each expert: redundant ones go to the expert with most rows in each of its slots."""
    replicas = [1] * len(counts)
    for _ in range(num_slots - len(counts)):
        allowed = [expert for expert, count in enumerate(replicas) if count < num_ranks]
        replicas[max(allowed, key=lambda expert: (counts[expert] / replicas[expert], -expert))] += 1
    return replicas


def _kept_in_place(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """`after` in such an order that what a rank holds already stays in its slot."""
    new = list(after)
    kept: list[int | None] = []
    for expert in before:
        kept.append(expert if expert in new else None)
        if expert in new:
            new.remove(expert)
    return [new.pop(0) if expert is None else expert for expert in kept]
