"""When `kvrelay up` restarts a dead child, and when it gives up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.up.restarts import RestartPolicy, exit_code


def test_child_that_was_never_ready_ends_everything_with_its_code() -> None:
    assert RestartPolicy().died(1.0) is None
    assert [exit_code(return_code) for return_code in (78, -9, 0)] == [78, 137, 1]


def test_child_that_was_ready_is_restarted_at_once() -> None:
    policy = RestartPolicy()
    policy.ready(0.0)
    assert policy.died(1.0) == 0.0


def test_restart_delay_of_a_crash_loop_grows_to_a_bound_without_giving_up() -> None:
    policy = RestartPolicy()
    policy.ready(0.0)
    delays = [delay_s for _ in range(100) if (delay_s := policy.died(0.5)) is not None]
    assert delays[:5] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert delays == sorted(delays)
    assert (len(delays), delays[-1]) == (100, 30.0)


def test_steady_time_resets_the_restart_delay() -> None:
    policy = RestartPolicy()
    for now_s in (0.0, 1.0, 2.0, 3.0):
        policy.ready(now_s)
        policy.died(now_s + 0.5)
    policy.ready(10.0)
    assert policy.died(25.0) == 0.0


def test_a_child_that_is_killed_every_few_seconds_returns_at_once() -> None:
    policy = RestartPolicy()
    for start_s in range(0, 300, 3):
        policy.ready(float(start_s))
        assert policy.died(start_s + 2.0) == 0.0


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=30))
def test_once_ready_every_death_leads_to_a_bounded_restart(events: list[tuple[bool, float]]) -> None:
    policy, now_s = RestartPolicy(), 0.0
    policy.ready(now_s)
    for becomes_ready, wait_s in events:
        now_s += wait_s
        if becomes_ready:
            policy.ready(now_s)
        delay_s = policy.died(now_s)
        assert delay_s is not None
        assert 0 <= delay_s <= 30
