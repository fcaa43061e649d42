"""Placements of experts in slots: complete, even, and changed by few moves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.model.mixture.placement import Placement, imbalance


def check_whole(placement: Placement, moves_from: Placement) -> None:
    """Every expert has a slot, none has more than there are ranks, and the moves lead here."""
    held = [len(slots) for slots in placement.slots_of_experts()]
    assert min(held) >= 1
    assert max(held) <= placement.num_ranks
    slots = list(moves_from.slots)
    for move in moves_from.moves_to(placement):
        slots[move.slot] = moves_from.slots[move.source]
    assert tuple(slots) == placement.slots


def test_without_redundant_slots_the_first_placement_is_that_of_ranges() -> None:
    assert Placement.initial(5, 2, 0).by_rank() == [[0, 1], [2, 3, 4]]
    assert Placement.initial(4, 2, 2).by_rank() == [[0, 1, 2], [3, 0, 1]]


@given(st.data())
def test_any_counts_give_a_placement_of_all_experts_that_moves_lead_to(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(2, 6))
    num_experts = data.draw(st.integers(num_ranks, 40))
    redundant = data.draw(st.integers(0, num_experts * (num_ranks - 1)))
    first = Placement.initial(num_experts, num_ranks, redundant)
    counts = data.draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
    after = first.balanced(counts)
    check_whole(after, first)
    check_whole(after.balanced(list(reversed(counts))), after)


@pytest.mark.parametrize("redundant", [0, 8])
@pytest.mark.parametrize("seed", range(5))
def test_zipf_is_evened_out(redundant: int, seed: int) -> None:
    draw = random.Random(seed)
    counts = [1000.0 / (rank + 1) for rank in range(64)]
    draw.shuffle(counts)
    first = Placement.initial(64, 4, redundant)
    after = first.balanced(counts)
    check_whole(after, first)
    assert all(len({*experts}) == len(experts) for experts in after.by_rank()), "a rank has an expert twice"
    assert imbalance(after.loads(counts)) <= (1.02 if redundant else 1.1)
    assert len(first.moves_to(after)) < 50
    # Slightly other counts: few experts move again.
    noisy = [count * draw.uniform(0.98, 1.02) for count in counts]
    assert len(after.moves_to(after.balanced(noisy))) < 15


def test_an_expert_is_fetched_from_its_own_rank_if_it_is_there() -> None:
    before = Placement(3, 2, (0, 1, 2, 0))
    after = Placement(3, 2, (1, 1, 2, 0))
    assert before.moves_to(after) == [(0, 1)]
