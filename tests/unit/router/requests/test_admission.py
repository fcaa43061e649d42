"""Admission: objectives, when to hold back, and the fair queue."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mock_clock import MockClock

from common.base.errors import Overloaded
from common.control.messages import Adapter, Role
from router.policy import POLICIES, Decision, Fleet, Memory, Query, Routing, place
from router.requests.admission import Objectives, crowded, wait_s
from router.requests.admission_queue import AdmissionQueue, QueueEntry
from router.requests.fair_queue import TokensAhead
from router.requests.queued_request import QueuedRequest, Siblings, Tenant
from router.requests.slot_shares import fair_share


def fleets(prefill: dict[str, float], decode: dict[str, float]) -> tuple[Fleet, Fleet]:
    first, second = Fleet("prefill"), Fleet("decode")
    first.add("p0", "p0", **prefill)
    second.add("d0", "d0", **decode)
    for fleet in (first, second):
        fleet.costs = replace(fleet.costs, prefills=9, steps=9)
    return first, second


def check(objectives: Objectives, prefill: Fleet, decode: Fleet, ahead_s: float = 0.0) -> None:
    decision = place(Query(1000), prefill, decode, Routing(POLICIES["kv_aware"], 0, Memory()))
    objectives.check(decision, prefill, decode, ahead_s)


def test_a_queue_that_breaks_the_objective_is_refused_with_the_time_it_needs() -> None:
    prefill, decode = fleets({"waiting": 5, "queued_tokens": 20_000}, {"running": 40})
    with pytest.raises(Overloaded, match="first token") as caught:
        check(Objectives(ttft_s=2.0), prefill, decode)
    assert caught.value.retry_after_s == pytest.approx(20_000 * 0.0005 + 0.5 + 0.024 - 2.0, rel=0.01)
    check(Objectives(ttft_s=12.0), prefill, decode)
    check(Objectives(), prefill, decode)


def test_idle_nodes_are_always_tried_and_nothing_is_refused_unmeasured() -> None:
    prefill, decode = fleets({}, {})
    check(Objectives(ttft_s=0.01, tpot_s=0.001), prefill, decode)
    with pytest.raises(Overloaded):
        check(Objectives(ttft_s=0.01), prefill, decode, ahead_s=0.1)
    prefill, decode = fleets({"waiting": 5, "queued_tokens": 20_000}, {"running": 40})
    for fleet in (prefill, decode):
        fleet.costs = replace(fleet.costs, prefills=0, steps=0)
    check(Objectives(ttft_s=2.0, tpot_s=0.001), prefill, decode)


def test_what_waits_here_is_counted_at_the_pace_of_those_that_compute_prompts() -> None:
    prefill, decode = fleets({}, {})
    ahead = TokensAhead(of_prompts=1000)
    decode.add("d1", "d1")
    prefill.costs = replace(prefill.costs, queued_token_s=0.001)
    decode.costs = replace(decode.costs, queued_token_s=0.01)
    assert wait_s(ahead, prefill, decode) == pytest.approx(1.0)
    prefill.drop("p0")  # its pace says nothing of the decode nodes that take its place
    assert wait_s(ahead, prefill, decode) == pytest.approx(5.0)
    decode.costs = replace(decode.costs, prefills=0)  # nobody has measured theirs yet
    assert wait_s(ahead, prefill, decode) == pytest.approx(0.5)


def test_answers_are_counted_at_the_pace_of_full_decode_nodes_beside_the_prompts() -> None:
    prefill, decode = fleets({}, {"capacity": 8})
    prefill.costs = replace(prefill.costs, queued_token_s=0.001)
    decode.costs = replace(decode.costs, step_base_s=0.02, step_seq_s=0.0025, prefills=0)  # 8 tokens in 0.04 s
    assert wait_s(TokensAhead(1000, 1000), prefill, decode) == pytest.approx(5.0)
    assert wait_s(TokensAhead(9000, 1000), prefill, decode) == pytest.approx(9.0)
    decode.add("d1", "d1", capacity=16)  # 16 tokens in 0.06 s
    assert wait_s(TokensAhead(1000, 1000), prefill, decode) == pytest.approx(1000 / (8 / 0.04 + 16 / 0.06))
    decode.drop("d1")
    prefill.drop("p0")
    assert wait_s(TokensAhead(1000, 1000), prefill, decode) == pytest.approx(1.0 + 5.0)
    decode.costs = replace(decode.costs, steps=0)
    assert wait_s(TokensAhead(1000, 1000), prefill, decode) == pytest.approx(1.0)


def test_a_step_that_gets_too_slow_is_refused() -> None:
    prefill, decode = fleets({}, {"running": 40})
    with pytest.raises(Overloaded, match="each token"):
        check(Objectives(tpot_s=0.03), prefill, decode)
    check(Objectives(tpot_s=0.05), prefill, decode)


@pytest.mark.parametrize(
    ("prefill", "decode", "word"),
    [
        ({}, {}, ""),
        ({"waiting": 3, "queued_tokens": 1900}, {}, ""),
        ({"waiting": 3, "queued_tokens": 2100}, {}, "prefill"),
        ({"waiting": 1, "queued_tokens": 90_000}, {}, ""),
        ({"waiting": 80}, {}, "prefill"),
        ({}, {"running": 64, "waiting": 15}, ""),
        ({}, {"running": 64, "waiting": 16}, "decode"),
        ({}, {"running": 64, "waiting": 16, "ended": 1}, ""),
    ],
)
def test_requests_are_held_back_only_while_every_node_has_more_than_it_needs(
    prefill: dict[str, float], decode: dict[str, float], word: str
) -> None:
    why = crowded(*fleets(prefill, decode))
    assert bool(why) == bool(word)
    assert word in why


def room_for_none(prefill: Fleet, decode: Fleet, objectives: Objectives) -> AdmissionQueue:
    """A queue that releases nothing."""
    by_role: dict[Role, Fleet] = {"prefill": prefill, "decode": decode}
    return AdmissionQueue(by_role, objectives, max_wait_s=9.0, clock=MockClock(), call_soon=lambda _: None)


def test_an_objective_refuses_nobody_for_the_queue_of_another_tenant() -> None:
    prefill, decode = fleets({"waiting": 3, "queued_tokens": 2100}, {})
    objectives = Objectives(ttft_s=5.0)
    queue = room_for_none(prefill, decode, objectives)
    decision = place(Query(1000), prefill, decode, Routing(POLICIES["kv_aware"], 0, Memory()))

    def enter(number: int, tenant: str) -> QueueEntry | None:
        request = QueuedRequest(f"{tenant}{number}", 1000, 1, tenant=Tenant(tenant))
        return queue.enter(request, decision, admit=lambda: None, refuse=lambda _: None)

    def fill(tenant: str) -> None:
        for number in range(100):
            enter(number, tenant)

    with pytest.raises(Overloaded, match="first token"):
        fill("busy")
    entry = enter(0, "calm")
    assert entry is not None
    assert entry.ahead_s < 1.0


def test_requests_wait_for_the_nodes_of_their_adapter_and_hold_back_no_others() -> None:
    prefill, decode = fleets({}, {"running": 80.0})
    adapter, soon = Adapter("x", "1" * 64), list[Callable[[], None]]()
    decode.add("d1", "d1")
    decode.set_adapters("d0", [adapter])
    by_role: dict[Role, Fleet] = {"prefill": prefill, "decode": decode}
    queue = AdmissionQueue(by_role, Objectives(), max_wait_s=9.0, clock=MockClock(), call_soon=soon.append)
    admitted: list[str] = []

    def enter(name: str, adapter: Adapter | None) -> QueueEntry | None:
        request = QueuedRequest(name, 10, 1, adapter=adapter)
        return queue.enter(request, None, admit=lambda: admitted.append(name), refuse=lambda _: None)

    def release() -> list[str]:
        queue.release_soon()
        while soon:
            soon.pop()()
        return admitted

    for number in range(128):  # more would take other tenants' shares
        assert enter(f"first{number}", None) is None
    entry = enter("adapted", adapter)
    assert entry is not None
    assert entry.reason == "every decode node has more requests than it can run, of those with LoRA adapter 'x'"
    assert enter("second", None) is not None
    assert release() == ["second"]
    decode.update("d0", running=0.0)
    assert release() == ["second", "adapted"]
    assert enter("more", adapter) is None


class Full:
    """An admission queue before one decode node with 64 slots, whose load is what was sent to it."""

    def __init__(self, objectives: Objectives | None = None) -> None:
        prefill, self.decode = fleets({}, {})
        self.soon, self.at_node = list[Callable[[], None]](), list[str]()
        by_role: dict[Role, Fleet] = {"prefill": prefill, "decode": self.decode}
        clock = MockClock()
        self.queue = AdmissionQueue(
            by_role, objectives or Objectives(), max_wait_s=9.0, clock=clock, call_soon=self.soon.append
        )

    def enter(self, tenant: str, count: int, decision: Decision | None = None) -> None:
        for number in range(count):
            name = f"{tenant}-{number}"
            request = QueuedRequest(name, 10, 1900, tenant=Tenant(tenant))
            entry = self.queue.enter(request, decision, admit=partial(self._sent, name), refuse=lambda _: None)
            if entry is None:
                self._sent(name)

    def _sent(self, name: str) -> None:
        self.at_node.append(name)
        self.decode.sent("d0", tokens=1, blocks=1)

    def over(self, name: str) -> None:
        self.at_node.remove(name)
        self.decode.over("d0", tokens=1, blocks=1, reported=False)
        self.queue.remove(name)
        self.queue.release_soon()
        while self.soon:
            self.soon.pop()()

    def counts(self) -> Counter[str]:
        return Counter(name.partition("-")[0] for name in self.at_node)


def test_a_tenant_with_a_free_share_waits_for_none_that_has_every_slot() -> None:
    full = Full()
    full.enter("hog", 200)
    assert full.counts() == {"hog": 80}
    full.enter("calm", 40)
    assert full.counts() == {"hog": 80, "calm": 32}, "half of the slots, and no more"
    full.over("calm-0")
    assert full.counts() == {"hog": 80, "calm": 32}, "the next one of the same tenant"
    full.over("hog-0")
    assert full.counts() == {"hog": 79, "calm": 32}, "nothing more of it runs while others wait"
    full.enter("third", 40)
    assert full.counts()["third"] == 21


def test_no_objective_refuses_a_tenant_that_takes_its_share() -> None:
    """The estimate counts what the nodes have: they preempt that."""

    class Missed(Objectives):
        def check(self, *_: object) -> None:
            raise Overloaded("it would be late")

    full = Full(Missed())
    full.enter("hog", 200)
    decision = cast("Decision", "some nodes")
    full.enter("calm", 32, decision)
    assert full.counts() == {"hog": 80, "calm": 32}
    for tenant in ("calm", "hog"):
        with pytest.raises(Overloaded):
            full.enter(tenant, 1, decision)


def test_one_tenant_alone_is_admitted_as_far_as_nodes_have_use_for_requests() -> None:
    full = Full()
    full.enter("hog", 200)
    for number in range(100):
        full.over(f"hog-{number}")
        assert full.counts() == {"hog": 80}


@given(st.integers(0, 100), st.lists(st.integers(0, 60), max_size=9))
def test_fair_shares_use_every_slot_that_is_wanted(num_slots: int, demands: list[int]) -> None:
    share = fair_share(num_slots, demands)
    assert math.isclose(sum(min(share, demand) for demand in demands), min(num_slots, sum(demands)))


def test_those_that_wait_for_a_sibling_count_until_they_enter_or_are_over() -> None:
    prefill, decode = fleets({"waiting": 3, "queued_tokens": 2100}, {})
    queue, siblings = room_for_none(prefill, decode, Objectives()), Siblings()

    def enter(name: str) -> None:
        request = QueuedRequest(name, 10, 1, tenant=Tenant("a"), siblings=siblings)
        queue.enter(request, None, admit=lambda: None, refuse=lambda _: None)

    enter("a0")
    for name in ("a1", "a2"):
        queue.follow(QueuedRequest(name, tenant=Tenant("a"), siblings=siblings))
    assert queue.victims(Tenant("b"), 3, 0) == ["a0"]
    assert len(queue) == 1
    siblings.admitted = True
    assert queue.begun_of_others(Tenant("b")) == 3
    enter("a1")
    assert queue.begun_of_others(Tenant("b")) == 3, "counted once"
    queue.remove("a2")
    assert queue.begun_of_others(Tenant("b")) == 2
    assert "a2" not in queue
    assert "a1" in queue
