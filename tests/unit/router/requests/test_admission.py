"""Admission: objectives, when to hold back, and the fair queue."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.base.clock import MockClock
from common.base.errors import Overloaded
from router.policy import Fleet, Memory, Query, place
from router.requests.admission import Objectives, crowded, wait_s
from router.requests.admission_queue import AdmissionQueue, QueueEntry
from router.requests.fair_queue import FairQueue, QueuedRequest, Siblings, Tenant


def fleets(prefill: dict[str, float], decode: dict[str, float]) -> tuple[Fleet, Fleet]:
    first, second = Fleet("prefill"), Fleet("decode")
    first.add("p0", "p0", **prefill)
    second.add("d0", "d0", **decode)
    for fleet in (first, second):
        fleet.costs = replace(fleet.costs, prefills=9, steps=9)
    return first, second


def check(objectives: Objectives, prefill: Fleet, decode: Fleet, ahead_s: float = 0.0) -> None:
    decision = place(Query(1000), prefill, decode, policy="kv_aware", local_prefill_tokens=0, memory=Memory())
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
    decode.add("d1", "d1")
    prefill.costs = replace(prefill.costs, queued_token_s=0.001)
    decode.costs = replace(decode.costs, queued_token_s=0.01)
    assert wait_s(1000, prefill, decode) == pytest.approx(1.0)
    prefill.drop("p0")  # its pace says nothing of the decode nodes that take its place
    assert wait_s(1000, prefill, decode) == pytest.approx(5.0)
    decode.costs = replace(decode.costs, prefills=0)  # nobody has measured theirs yet
    assert wait_s(1000, prefill, decode) == pytest.approx(0.5)


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


def held(
    name: str,
    tenant: str = "",
    priority: int = 0,
    tokens: int = 10,
    deadline_s: float = 1.0,
    user: str = "",
    siblings: Siblings | None = None,
) -> QueuedRequest:
    return QueuedRequest(name, tokens, deadline_s, priority, Tenant(tenant, user), siblings)


def drain(queue: FairQueue) -> list[str]:
    names: list[str] = []
    while len(queue):
        names.append(queue.pop() or "")
    assert queue.pop() is None
    return names


def test_lower_priority_numbers_go_first_and_equal_ones_in_order() -> None:
    queue = FairQueue()
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0)):
        queue.push(held(name, priority=priority))
    assert drain(queue) == ["c", "a", "d", "b"]


def test_tenants_share_by_tokens_not_by_requests() -> None:
    queue = FairQueue()
    for index in range(20):
        queue.push(held(f"big-{index}", "big", tokens=900))
    for index in range(60):
        queue.push(held(f"small-{index}", "small", tokens=300))
    first = Counter(name.partition("-")[0] for name in drain(queue)[:40])
    assert first == {"small": 30, "big": 10}


def test_a_tenant_that_comes_back_does_not_catch_up_on_what_it_never_asked_for() -> None:
    queue = FairQueue()
    for index in range(50):
        queue.push(held(f"a{index}", "a"))
    for _ in range(40):
        queue.pop()
    for index in range(10):
        queue.push(held(f"b{index}", "b"))
    assert Counter(name[0] for name in drain(queue)[:10]) == {"a": 5, "b": 5}


def test_a_full_queue_makes_room_at_the_cost_of_whoever_has_the_most() -> None:
    queue = FairQueue()
    for index in range(4):
        queue.push(held(f"a{index}", "a", priority=1 if index == 1 else 0))
    queue.push(held("b0", "b"))
    assert queue.victims(Tenant("b"), 1) == ["a1"]
    assert queue.victims(Tenant("a"), 1, priority=1) == []
    queue.push(held("b1", "b"))
    queue.push(held("b2", "b"))
    assert queue.victims(Tenant("b"), 1) == []


def test_urgent_requests_take_the_places_of_less_urgent_ones_of_the_same_user() -> None:
    queue = FairQueue()
    for index, priority in enumerate((0, 5, 9, 9)):
        queue.push(held(f"a{index}", "a", priority, user="u"))
    queue.push(held("b0", "b", priority=9))
    queue.push(held("b1", "b", priority=9))
    queue.push(held("b2", "b", priority=9))
    assert queue.victims(Tenant("a", "u"), 9, 0) == ["a3", "a2", "a1"]
    assert queue.victims(Tenant("a", "u"), 9, 5) == ["a3", "a2"]
    assert queue.victims(Tenant("a", "u"), 9, 9) == []
    assert queue.victims(Tenant("b"), 1, -1) == ["b2"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("uv"), st.integers(0, 2)), max_size=40),
    st.integers(0, 12),
    st.integers(0, 2),
)
def test_several_places_are_those_that_single_requests_would_get(
    queued: list[tuple[str, str, int]], count: int, priority: int
) -> None:
    queue, begun = FairQueue(), Siblings()
    begun.admitted = True
    for index, (tenant, user, each) in enumerate(queued):
        queue.push(held(str(index), tenant, each, user=user))
    victims, one_by_one = queue.victims(Tenant("a", "u"), count, priority), list[str]()
    for index in range(count):
        for victim in queue.victims(Tenant("a", "u"), 1, priority):
            queue.remove(victim)
            queue.push(held(f"new-{index}", "a", priority, user="u", siblings=begun))
            one_by_one.append(victim)
    assert victims == one_by_one


def test_those_whose_sibling_was_admitted_are_not_refused_but_count() -> None:
    queue, siblings = FairQueue(), Siblings()
    for index in range(4):
        queue.push(held(f"a{index}", "a", siblings=siblings))
    queue.push(held("a-alone", "a", priority=-1))
    queue.push(held("b0", "b"))
    assert queue.victims(Tenant("b"), 1) == ["a3"]
    assert len(queue.expired(1.0)) == 6
    siblings.admitted = True
    assert queue.victims(Tenant("b"), 1) == ["a-alone"]
    assert queue.victims(Tenant("a"), 1) == []
    assert queue.expired(1.0) == ["a-alone", "b0"]
    queue.remove("a-alone")
    assert queue.victims(Tenant("b"), 1) == []
    assert (queue.begun_of_others(Tenant("b")), queue.begun_of_others(Tenant("a"))) == (4, 0), "they take no place of b"


def test_those_that_wait_for_a_sibling_count_until_they_are_queued_or_over() -> None:
    queue, siblings = FairQueue(), Siblings()
    queue.push(held("a0", "a", siblings=siblings))
    for name in ("a1", "a2"):
        queue.follow(held(name, "a", siblings=siblings))
    assert queue.victims(Tenant("b"), 3) == ["a0"]
    assert len(queue) == 1
    queue.pop()
    siblings.admitted = True
    assert queue.begun_of_others(Tenant("b")) == 2
    queue.push(held("a1", "a", siblings=siblings))
    queue.remove("a2")
    assert queue.begun_of_others(Tenant("b")) == 1
    assert "a2" not in queue
    assert drain(queue) == ["a1"]


def test_a_tenant_with_a_user_for_each_request_gets_no_more_than_its_share() -> None:
    queue = FairQueue()
    for index in range(40):
        queue.push(held(f"greedy-{index}", "greedy", user=str(index)))
    for index in range(10):
        queue.push(held(f"modest-{index}", "modest", user="one"))
    assert Counter(name.partition("-")[0] for name in drain(queue)[:20]) == {"greedy": 10, "modest": 10}


def test_newcomers_that_never_cease_starve_nobody_and_are_forgotten() -> None:
    queue = FairQueue()
    for tenant, user in (("t", "u"), ("", "")):  # newcomers among the users of a tenant, and among tenants
        queue.push(held("first", tenant + "0", tokens=100, user=user))
        assert queue.pop() == "first"
        queue.push(held("second", tenant + "0", tokens=100, user=user))
        left = list[str | None]()
        for number in range(1000):
            name, own = (tenant + "0", f"{user}{number}") if tenant else (f"new{number}", "")
            queue.push(held(f"{number}", name, tokens=100, user=own))
            if number >= 10:
                left.append(queue.pop())
        assert "second" in left[:40]
        clocks = [queue._shares, *queue._shares_of_users.values()]
        assert all(len(each._clocks) < 40 for each in clocks), "each turn looks at all clocks"
        drain(queue)


def test_who_waits_behind_more_urgent_requests_gains_no_credit_among_these() -> None:
    queue = FairQueue()
    queue.push(held("patient", "a", priority=1))
    for number in range(20):
        queue.push(held(f"b{number}", "b", tokens=100))
        queue.pop()
    for number in range(4):
        queue.push(held(f"a-now{number}", "a", tokens=100))
        queue.push(held(f"b-now{number}", "b", tokens=100))
    assert "b-now0" in drain(queue)[:3]


@pytest.mark.parametrize("urgent_tokens", [10, 100, 1000])
@pytest.mark.parametrize("of_users", [False, True])
def test_those_who_wait_behind_more_urgent_requests_share_what_these_leave(urgent_tokens: int, of_users: bool) -> None:
    queue = FairQueue()

    def push(name: str, count: int) -> None:
        for number in range(count):
            tenant, user = ("t", name) if of_users else (name, "")
            queue.push(held(f"{name}-{number}", tenant, priority=1, tokens=100, user=user))

    def left(turns: int) -> Counter[str]:
        names: list[str] = []
        for number in range(turns):
            queue.push(held(f"urgent-{number}", "urgent", tokens=urgent_tokens))
            names += [queue.pop() or "", queue.pop() or ""]
        return Counter(name.partition("-")[0] for name in names)

    push("a", 60)
    push("b", 60)
    assert left(40) == {"urgent": 40, "a": 20, "b": 20}
    push("late", 60)
    assert left(45) == {"urgent": 45, "a": 15, "b": 15, "late": 15}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("uv"), st.integers(0, 1), st.booleans()), max_size=60),
    st.sampled_from("abcd"),
    st.sampled_from("uvw"),
    st.integers(0, 1),
)
def test_what_leaves_before_a_new_request_is_known(
    steps: list[tuple[str, str, int, bool]], tenant: str, user: str, priority: int
) -> None:
    queue = FairQueue()
    for number, (name, of_name, urgency, out) in enumerate(steps):
        queue.push(held(f"r{number}", name, urgency, user=of_name))
        if out:
            queue.pop()
    ahead = queue.tokens_ahead(priority, Tenant(tenant, user))
    queue.push(held("new", tenant, priority, user=user))
    assert ahead == pytest.approx(10 * drain(queue).index("new"), abs=10 * 4 * 3)  # a request of each user at each turn


def test_an_objective_refuses_nobody_for_the_queue_of_another_tenant() -> None:
    prefill, decode = fleets({"waiting": 3, "queued_tokens": 2100}, {})
    objectives = Objectives(ttft_s=5.0)
    queue = AdmissionQueue(
        {"prefill": prefill, "decode": decode}, objectives, max_wait_s=9.0, clock=MockClock(), call_soon=lambda _: None
    )
    decision = place(Query(1000), prefill, decode, policy="kv_aware", local_prefill_tokens=0, memory=Memory())

    def enter(number: int, tenant: str) -> QueueEntry | None:
        return queue.enter(
            f"{tenant}{number}",
            decision,
            prompt_tokens=1000,
            max_tokens=1,
            admit=lambda: None,
            refuse=lambda _: None,
            tenant=Tenant(tenant),
        )

    def fill(tenant: str) -> None:
        for number in range(100):
            enter(number, tenant)

    with pytest.raises(Overloaded, match="first token"):
        fill("busy")
    entry = enter(0, "calm")
    assert entry is not None
    assert entry.ahead_s < 1.0


def test_users_of_one_tenant_share_what_it_gets() -> None:
    queue = FairQueue()
    for index in range(30):
        queue.push(held(f"busy-{index}", "proxy", user="busy"))
    for index in range(5):
        queue.push(held(f"calm-{index}", "proxy", user="calm"))
    assert queue.victims(Tenant("proxy", "calm"), 1) == ["busy-29"]
    assert queue.victims(Tenant("proxy", "busy"), 1) == []
    assert queue.victims(Tenant("other", "x"), 1) == ["busy-29"]
    assert Counter(name.partition("-")[0] for name in drain(queue)[:10]) == {"busy": 5, "calm": 5}


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 500), st.booleans(), st.integers(0, 3)),
        max_size=60,
    )
)
def test_every_request_leaves_exactly_once(steps: list[tuple[str, int, int, bool, int]]) -> None:
    queue, inside = FairQueue(), dict[str, tuple[str, int]]()
    for number, (tenant, priority, tokens, out, remove) in enumerate(steps):
        name = f"r{number}"
        queue.push(held(name, tenant, priority, tokens, deadline_s=float(number)))
        inside[name] = (tenant, priority)
        if out:
            left = queue.pop()
            assert left is not None
            gone = inside.pop(left)
            assert gone[1] == min([gone[1], *(each[1] for each in inside.values())])
            assert not [n for n, each in inside.items() if each == gone and int(n[1:]) < int(left[1:])]
        if remove and inside:
            name = list(inside)[remove % len(inside)]
            queue.remove(name)
            queue.remove(name)
            del inside[name]
        assert len(queue) == len(inside)
        assert set(queue.expired(float(number + 1))) == set(inside)
    assert set(drain(queue)) == set(inside)
