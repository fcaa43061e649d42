"""The planner's decisions: each failure that planners of other projects had is a case here."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.planner.plan import COOL_DOWN_S, MANUAL_S, QUIET_S, Observed, PlanMemory, ShapeDecision, plan
from router.planner.sizing import COLD, Demand, NodeCounts, RoleCosts, need
from router.policy.costs import Costs
from router.requests.admission import Objectives

OBJECTIVES = Objectives(2.0, 0.1)
COSTS = RoleCosts(
    Costs(queued_token_s=0.0001, prefills=1000),
    Costs(step_base_s=0.02, step_seq_s=0.001, output_tokens=100, steps=1000),
    slots=64,
)
"""A prefill node computes 10,000 tokens/s, a decode node with 64 sequences generates 762."""
LONG_PROMPTS, LONG_ANSWERS = Demand(600, 25_000, 500), Demand(600, 5_000, 2200)
"""They need 3.5 + 0.8 and 0.6 + 3.4 nodes."""
EVEN = NodeCounts(2, 2)


def observed(demand: Demand, wanted: NodeCounts = EVEN, now_s: float = 1e6, **changes: object) -> Observed:
    return replace(Observed(now_s, wanted, wanted, demand, COSTS), **changes)


def decide(seen: Observed, memory: PlanMemory | None = None, max_nodes: int | None = None) -> ShapeDecision:
    return plan(seen, OBJECTIVES, max_nodes, memory or PlanMemory())


@pytest.mark.parametrize(
    ("demand", "wanted", "counts", "why"),
    [
        (LONG_PROMPTS, EVEN, (3, 1), "prefill nodes are short"),
        (LONG_ANSWERS, EVEN, (1, 3), "decode nodes are short"),
        (Demand(600, 12_000, 1000), EVEN, EVEN, "no other split"),
        (Demand(600, 1_000, 100), NodeCounts(3, 1), (3, 1), "that is enough"),
        (Demand(600), EVEN, EVEN, "no other split"),
        (Demand(30, 25_000, 500), EVEN, EVEN, "measured for 30 of 180 s"),
        (LONG_PROMPTS, NodeCounts(0, 4), (0, 4), "decode nodes compute all prompts"),
        (Demand(600, math.nan, 500), EVEN, EVEN, "not numbers"),
        (Demand(600, math.inf, 500), EVEN, EVEN, "not numbers"),
    ],
)
def test_the_split_follows_the_load_and_says_why(
    demand: Demand, wanted: NodeCounts, counts: tuple[int, int], why: str
) -> None:
    decision = decide(observed(demand, wanted))
    assert decision.counts == counts
    assert why in decision.why
    assert decision.counts.total == wanted.total, "one decision never asks for more nodes, not even for a moment"


def test_the_sentence_has_what_was_measured_and_what_it_needs() -> None:
    assert decide(observed(LONG_PROMPTS)).why == (
        "prefill 2, decode 2 with 25,000 prompt tokens/s to compute and 500 tokens/s to generate, which need 3.5 prefill and "
        "0.8 decode nodes: changed to prefill 3, decode 1, because prefill nodes are short"
    )


@pytest.mark.parametrize(("prefills", "steps", "role"), [(COLD - 1, 1000, "prefill"), (1000, COLD - 1, "decode")])
def test_costs_of_a_cold_cluster_are_not_believed(prefills: int, steps: int, role: str) -> None:
    costs = RoleCosts(replace(COSTS.prefill, prefills=prefills), replace(COSTS.decode, steps=steps), 64)
    decision = decide(observed(LONG_PROMPTS, costs=costs))
    assert decision.counts == EVEN
    assert f"{role} has 19 of 20 samples" in decision.why


def test_a_tighter_objective_needs_more_nodes() -> None:
    loose, tight = (need(LONG_ANSWERS, COSTS, Objectives(ttft, tpot)) for ttft, tpot in ((5.0, 0.2), (0.05, 0.03)))
    assert tight.prefill > loose.prefill
    assert tight.decode > loose.decode
    assert need(Demand(), COSTS, OBJECTIVES) == (0, 0)


def test_a_node_that_cannot_start_is_awaited_and_then_planned_without() -> None:
    usable = NodeCounts(2, 1)
    decision = decide(observed(LONG_PROMPTS, now_s=0, usable=usable))
    assert "waiting for nodes to start" in decision.why
    decision = decide(observed(LONG_PROMPTS, now_s=299, usable=usable), decision.memory)
    assert decision.counts == EVEN
    decision = decide(observed(LONG_PROMPTS, NodeCounts(2, 3), now_s=301, usable=NodeCounts(2, 2)), PlanMemory())
    late = decide(observed(LONG_PROMPTS, NodeCounts(2, 3), now_s=602, usable=NodeCounts(2, 2)), decision.memory)
    assert late.counts == (3, 2), "of two decode nodes one would not start, so two must be wanted"


def test_numbers_set_by_hand_are_left_alone_for_an_hour() -> None:
    first = decide(observed(Demand(600), now_s=0))
    decision = decide(observed(LONG_ANSWERS, NodeCounts(4, 1), now_s=10), first.memory)
    assert decision.counts == (4, 1)
    assert "somebody set prefill 4, decode 1 by hand" in decision.why
    decision = decide(observed(LONG_ANSWERS, NodeCounts(4, 1), now_s=MANUAL_S), decision.memory)
    assert decision.counts == (4, 1)
    decision = decide(observed(LONG_ANSWERS, NodeCounts(4, 1), now_s=MANUAL_S + 20), decision.memory)
    assert decision.counts == (1, 4)
    assert "by hand" not in decide(observed(LONG_ANSWERS, NodeCounts(1, 4), now_s=MANUAL_S + 30), decision.memory).why


def test_nothing_turns_back_within_ten_minutes() -> None:
    decision = decide(observed(LONG_PROMPTS, now_s=0))
    assert decision.counts == (3, 1)
    memory, wanted = decision.memory, decision.counts
    for now_s in range(10, int(COOL_DOWN_S) + 10, 10):
        decision = decide(observed(LONG_ANSWERS, wanted, now_s=now_s), memory)
        assert decision.counts == wanted, now_s
        memory = decision.memory
    assert "not before" in decision.why
    assert decide(observed(LONG_ANSWERS, wanted, now_s=COOL_DOWN_S + 20), memory).counts == (1, 3)


def test_the_ten_minutes_begin_when_all_nodes_are_usable() -> None:
    """A node that drains for minutes before it changes its role would else change back too soon."""
    memory, wanted = decide(observed(LONG_PROMPTS, now_s=0)).memory, NodeCounts(3, 1)
    for now_s in range(10, 210, 10):
        memory = decide(observed(LONG_ANSWERS, wanted, now_s=now_s, usable=NodeCounts(2, 1)), memory).memory
    late_s = 200 + COOL_DOWN_S - 10
    memory = decide(observed(LONG_ANSWERS, wanted, now_s=210), memory).memory
    assert "not before" in decide(observed(LONG_ANSWERS, wanted, now_s=late_s), memory).why
    # One that dies later delays nothing.
    memory = decide(observed(LONG_ANSWERS, wanted, now_s=500, usable=NodeCounts(3, 0)), memory).memory
    assert decide(observed(LONG_ANSWERS, wanted, now_s=late_s + 30), memory).counts == (1, 3)


def test_with_room_it_grows_at_once_and_shrinks_after_a_quiet_time() -> None:
    decision = decide(observed(Demand(600, 30_000, 1200), now_s=0), None, 6)
    assert decision.counts == (4, 2)
    heavy = decide(observed(Demand(600, 90_000, 9000), now_s=0), None, 6)
    assert heavy.counts.total == 6
    now_s, wanted = 1000.0, NodeCounts(4, 2)
    decision = decide(observed(Demand(600), wanted, now_s=now_s), None, 6)
    assert decision.counts == wanted
    decision = decide(observed(Demand(600), wanted, now_s=now_s + QUIET_S), decision.memory, 6)
    assert decision.counts == (1, 1)
    assert "fewer nodes suffice" in decision.why


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([None, 6, 20]),
    st.lists(st.tuples(st.floats(0, 200_000), st.floats(0, 20_000), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([10.0, 60.0, 200.0]),
)
def test_no_node_switches_twice_in_ten_minutes(
    prefill: int, decode: int, most: int | None, loads: list[tuple[float, float, bool]], tick_s: float
) -> None:
    """Whatever the load does, and whether or not nodes start in time."""
    wanted, memory = NodeCounts(prefill, decode), PlanMemory()
    usable, total = wanted, wanted.total
    switched: dict[tuple[str, int], float] = {}
    for turn, (prompts, answers, starts) in enumerate(loads):
        now_s = turn * tick_s
        decision = decide(Observed(now_s, wanted, usable, Demand(600, prompts, answers), COSTS), memory, most)
        assert decision.counts.total <= (total if most is None else max(total, most))
        assert min(decision.counts) >= 1
        assert "nan" not in decision.why
        for role in ("prefill", "decode"):
            old, new = getattr(wanted, role), getattr(decision.counts, role)
            for number in range(min(old, new), max(old, new)):
                assert now_s - switched.get((role, number), -math.inf) >= COOL_DOWN_S, decision.why
                switched[role, number] = now_s
        wanted, memory = decision.counts, decision.memory
        usable = wanted if starts else NodeCounts(*(min(pair) for pair in zip(usable, wanted, strict=True)))
