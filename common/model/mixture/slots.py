"""The slots of a layer's experts on one rank: the expert in each slot, the rows that go to it, and the count of rows by expert.
Used by the engine's thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.model.formats.base import Linear
from common.model.mixture.placement import Placement
from common.model.mixture.routing import Routing


class ExpertSlots:
    """Experts of one layer that may move. All ranks of a stage have the same placement and count the same rows."""

    def __init__(self, placement: Placement, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.own = placement.range_of(rank)
        """This rank's slots."""
        self.linears: Sequence[tuple[Linear, Linear]] = ()
        """The gate-and-up layer and the down layer in each of this rank's slots."""
        self.table = torch.zeros(placement.num_experts, placement.num_ranks, dtype=torch.int32, device=device)
        """[experts, ranks]: the slots of each expert, as many as `replicas` has."""
        self.replicas = torch.ones(placement.num_experts, dtype=torch.int32, device=device)
        """[experts]: how many slots hold each expert."""
        self.counts = torch.zeros(placement.num_experts, dtype=torch.int64, device=device)
        """[experts]: rows of each expert, on whichever rank, since experts of the layer moved last."""
        self.place(placement)

    def place(self, placement: Placement) -> None:
        """From now on rows go to the slots of `placement`. The tables stay where they are in memory."""
        self.placement = placement
        for expert, slots in enumerate(placement.slots_of_experts()):
            self.table[expert, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
            self.replicas[expert] = len(slots)
        self.counts.zero_()

    def choose(self, routing: Routing) -> Tensor:
        """[T, top_k] int32, the slot that computes each expert of each row. The replicas of an expert take its rows in turn: every
        rank counts the same rows and comes to the same result. `next_slot` of the native kernels does the same."""
        slots, counts = self.assign(routing)
        self.counts += counts
        return slots

    def assign(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Choose slots as `choose` does, without counting the rows. Returns the slots, and [experts] int64: rows of each expert."""
        experts = routing.experts.flatten()
        order = experts.argsort(stable=True)
        counts = torch.zeros_like(self.counts).scatter_add_(0, experts, torch.ones_like(experts))
        firsts = counts.cumsum(0) - counts  # in `order`, of each expert
        turns = torch.empty_like(experts)
        turns[order] = torch.arange(experts.numel(), device=experts.device) - firsts[experts[order]]
        slots = self.table[experts, (self.counts[experts] + turns) % self.replicas[experts]]
        return slots.view(routing.experts.shape), counts

    def rank_loads(self) -> list[int]:
        """Rows that each rank of the stage computed since experts of the layer moved last."""
        counts, placement = self.counts.tolist(), self.placement
        loads = [0] * len(placement.slots)
        for expert, slots in enumerate(placement.slots_of_experts()):
            for turn, slot in enumerate(slots):
                loads[slot] = (counts[expert] + len(slots) - 1 - turn) // len(slots)
        return [sum(loads[slot] for slot in placement.range_of(rank)) for rank in range(placement.num_ranks)]
