"""A full queue: who gives way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.queued_requests import queued_request

from router.requests.full_queue import begun_of_others, victims
from router.requests.queued_request import QueuedRequest, Siblings, Tenant


def refused(
    queued: list[QueuedRequest],
    tenant: Tenant,
    count: int,
    priority: int = 0,
    followers: list[QueuedRequest] | None = None,
) -> list[str]:
    return victims(queued, followers or [], tenant, count, priority)


def test_a_full_queue_makes_room_at_the_cost_of_whoever_has_the_most() -> None:
    queue = [queued_request(f"a{index}", "a", priority=1 if index == 1 else 0) for index in range(4)]
    queue.append(queued_request("b0", "b"))
    assert refused(queue, Tenant("b"), 1) == ["a1"]
    assert refused(queue, Tenant("a"), 1, priority=1) == []
    queue += [queued_request("b1", "b"), queued_request("b2", "b")]
    assert refused(queue, Tenant("b"), 1) == []


def test_among_the_users_of_a_tenant_the_one_with_the_most_gives_way() -> None:
    queue = [queued_request(f"busy-{index}", "proxy", user="busy") for index in range(30)]
    queue += [queued_request(f"calm-{index}", "proxy", user="calm") for index in range(5)]
    assert refused(queue, Tenant("proxy", "calm"), 1) == ["busy-29"]
    assert refused(queue, Tenant("proxy", "busy"), 1) == []
    assert refused(queue, Tenant("other", "x"), 1) == ["busy-29"]


def test_urgent_requests_take_the_places_of_less_urgent_ones_of_the_same_user() -> None:
    queue = [queued_request(f"a{index}", "a", priority, user="u") for index, priority in enumerate((0, 5, 9, 9))]
    queue += [queued_request(f"b{index}", "b", priority=9) for index in range(3)]
    assert refused(queue, Tenant("a", "u"), 9, 0) == ["a3", "a2", "a1"]
    assert refused(queue, Tenant("a", "u"), 9, 5) == ["a3", "a2"]
    assert refused(queue, Tenant("a", "u"), 9, 9) == []
    assert refused(queue, Tenant("b"), 1, -1) == ["b2"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("uv"), st.integers(0, 2)), max_size=40),
    st.integers(0, 12),
    st.integers(0, 2),
)
def test_several_places_are_those_that_single_requests_would_get(
    waiting: list[tuple[str, str, int]], count: int, priority: int
) -> None:
    begun = Siblings()
    begun.admitted = True
    queue = [queued_request(str(index), tenant, each, user=user) for index, (tenant, user, each) in enumerate(waiting)]
    together, one_by_one = refused(queue, Tenant("a", "u"), count, priority), list[str]()
    for index in range(count):
        for victim in refused(queue, Tenant("a", "u"), 1, priority):
            queue = [each for each in queue if each.request_id != victim]
            queue.append(queued_request(f"new-{index}", "a", priority, user="u", siblings=begun))
            one_by_one.append(victim)
    assert together == one_by_one


def test_those_whose_sibling_was_admitted_are_not_refused_but_count() -> None:
    siblings = Siblings()
    queue = [queued_request(f"a{index}", "a", siblings=siblings) for index in range(4)]
    queue += [queued_request("a-alone", "a", priority=-1), queued_request("b0", "b")]
    assert refused(queue, Tenant("b"), 1) == ["a3"]
    siblings.admitted = True
    assert refused(queue, Tenant("b"), 1) == ["a-alone"]
    assert refused(queue, Tenant("a"), 1) == []
    del queue[4]
    assert refused(queue, Tenant("b"), 1) == []
    assert begun_of_others(queue, Tenant("b")) == 4, "they take no place of b"
    assert begun_of_others(queue, Tenant("a")) == 0


def test_those_that_wait_for_a_sibling_count_and_are_not_refused() -> None:
    siblings = Siblings()
    followers = [queued_request(name, "a", siblings=siblings) for name in ("a1", "a2")]
    assert refused([queued_request("a0", "a", siblings=siblings)], Tenant("b"), 3, followers=followers) == ["a0"]
