"""The fair queue: who leaves first, and what leaves before a new request."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.queued_requests import queued_request

from common.control.messages import Adapter
from router.requests.fair_queue import FairQueue
from router.requests.queued_request import Siblings, Tenant


def drain(queue: FairQueue) -> list[str]:
    names: list[str] = []
    while len(queue):
        names.append(queue.pop() or "")
    assert queue.pop() is None
    return names


def test_lower_priority_numbers_go_first_and_equal_ones_in_order() -> None:
    queue = FairQueue()
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0)):
        queue.push(queued_request(name, priority=priority))
    assert drain(queue) == ["c", "a", "d", "b"]


def test_tenants_share_by_tokens_not_by_requests() -> None:
    queue = FairQueue()
    for index in range(20):
        queue.push(queued_request(f"big-{index}", "big", tokens=900))
    for index in range(60):
        queue.push(queued_request(f"small-{index}", "small", tokens=300))
    first = Counter(name.partition("-")[0] for name in drain(queue)[:40])
    assert first == {"small": 30, "big": 10}


def test_a_tenant_that_comes_back_does_not_catch_up_on_what_it_never_asked_for() -> None:
    queue = FairQueue()
    for index in range(50):
        queue.push(queued_request(f"a{index}", "a"))
    for _ in range(40):
        queue.pop()
    for index in range(10):
        queue.push(queued_request(f"b{index}", "b"))
    assert Counter(name[0] for name in drain(queue)[:10]) == {"a": 5, "b": 5}


def test_a_tenant_with_a_user_for_each_request_gets_no_more_than_its_share() -> None:
    queue = FairQueue()
    for index in range(40):
        queue.push(queued_request(f"greedy-{index}", "greedy", user=str(index)))
    for index in range(10):
        queue.push(queued_request(f"modest-{index}", "modest", user="one"))
    assert Counter(name.partition("-")[0] for name in drain(queue)[:20]) == {"greedy": 10, "modest": 10}


def test_newcomers_that_never_cease_starve_nobody_and_are_forgotten() -> None:
    queue = FairQueue()
    for tenant, user in (("t", "u"), ("", "")):  # newcomers among the users of a tenant, and among tenants
        queue.push(queued_request("first", tenant + "0", tokens=100, user=user))
        assert queue.pop() == "first"
        queue.push(queued_request("second", tenant + "0", tokens=100, user=user))
        left = list[str | None]()
        for number in range(1000):
            name, own = (tenant + "0", f"{user}{number}") if tenant else (f"new{number}", "")
            queue.push(queued_request(f"{number}", name, tokens=100, user=own))
            if number >= 10:
                left.append(queue.pop())
        assert "second" in left[:40]
        clocks = [queue._shares, *queue._shares_of_users.values()]
        assert all(len(each._clocks) < 40 for each in clocks), "each turn looks at all clocks"
        drain(queue)


def test_who_waits_behind_more_urgent_requests_gains_no_credit_among_these() -> None:
    queue = FairQueue()
    queue.push(queued_request("patient", "a", priority=1))
    for number in range(20):
        queue.push(queued_request(f"b{number}", "b", tokens=100))
        queue.pop()
    for number in range(4):
        queue.push(queued_request(f"a-now{number}", "a", tokens=100))
        queue.push(queued_request(f"b-now{number}", "b", tokens=100))
    assert "b-now0" in drain(queue)[:3]


@pytest.mark.parametrize("urgent_tokens", [10, 100, 1000])
@pytest.mark.parametrize("of_users", [False, True])
def test_those_who_wait_behind_more_urgent_requests_share_what_these_leave(urgent_tokens: int, of_users: bool) -> None:
    queue = FairQueue()

    def push(name: str, count: int) -> None:
        for number in range(count):
            tenant, user = ("t", name) if of_users else (name, "")
            queue.push(queued_request(f"{name}-{number}", tenant, priority=1, tokens=100, user=user))

    def left(turns: int) -> Counter[str]:
        names: list[str] = []
        for number in range(turns):
            queue.push(queued_request(f"urgent-{number}", "urgent", tokens=urgent_tokens))
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
        queue.push(queued_request(f"r{number}", name, urgency, user=of_name))
        if out:
            queue.pop()
    ahead = sum(queue.tokens_ahead(priority, Tenant(tenant, user)))
    queue.push(queued_request("new", tenant, priority, user=user))
    assert ahead == pytest.approx(10 * drain(queue).index("new"), abs=10 * 4 * 3)  # a request of each user at each turn


def test_requests_whose_adapter_has_no_room_let_others_go_first_and_share_what_comes_later() -> None:
    queue, adapter, other = FairQueue(), Adapter("x", "1" * 64), Adapter("y", "2" * 64)
    for number in range(30):
        queue.push(queued_request(f"a-{number}", "a", priority=-1 if number % 2 else 0)._replace(adapter=adapter))
        queue.push(queued_request(f"b-{number}", "b", user=str(number % 3)))
    queue.push(queued_request("a-own", "a"))
    queue.push(queued_request("y", "c")._replace(adapter=other))
    assert set(queue.adapters) == {adapter, other}
    first = [queue.pop([adapter]) or "" for _ in range(12)]
    assert Counter(name.partition("-")[0] for name in first) == {"b": 10, "a": 1, "y": 1}
    assert "a-own" in first
    urgent = [queue.pop() for _ in range(15)]
    assert urgent == [f"a-{number}" for number in range(1, 30, 2)]
    assert Counter((queue.pop() or "").partition("-")[0] for _ in range(10)) == {"a": 5, "b": 5}
    while (left := queue.pop([adapter])) is not None:
        assert left.startswith("b")
    assert len(queue) == 10
    assert len(drain(queue)) == 10
    assert not queue.adapters


def test_users_of_one_tenant_share_what_it_gets() -> None:
    queue = FairQueue()
    for index in range(30):
        queue.push(queued_request(f"busy-{index}", "proxy", user="busy"))
    for index in range(5):
        queue.push(queued_request(f"calm-{index}", "proxy", user="calm"))
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
        queue.push(queued_request(name, tenant, priority, tokens, deadline_s=float(number)))
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


def test_those_whose_deadline_has_passed_expire_unless_a_sibling_was_admitted() -> None:
    queue, siblings = FairQueue(), Siblings()
    queue.push(queued_request("a", siblings=siblings))
    queue.push(queued_request("b", deadline_s=1.0))
    queue.push(queued_request("late", deadline_s=1.5))
    assert queue.expired(1.0) == ["a", "b"]
    siblings.admitted = True
    assert queue.expired(1.0) == ["b"]


def test_prompts_and_answers_ahead_are_told_apart() -> None:
    queue = FairQueue()
    queue.push(queued_request("urgent", "a")._replace(prompt_tokens=300, answer_tokens=100, priority=-1))
    queue.push(queued_request("equal", "b")._replace(prompt_tokens=100, answer_tokens=500))
    queue.push(queued_request("patient", "a")._replace(prompt_tokens=9000, answer_tokens=9000, priority=1))
    assert queue.tokens_ahead(-2, Tenant("a")) == (0, 0)
    assert queue.tokens_ahead(-1, Tenant("a")) == (300, 100)
    assert queue.tokens_ahead(0, Tenant("b")) == (400, 600)
