"""When a drained node may say that it is idle, and how its engine is looked into."""

from __future__ import annotations

import threading

import pytest
from support.mock_clock import MockClock

from common.engine.loop import EngineLoop
from common.node.drain import Drain


def test_a_lease_holder_counts_as_told_with_its_second_ping() -> None:
    clock = MockClock()
    drain = Drain(3.0, clock)
    drain.pinged(b"a")
    assert drain.num_unaware([b"a", b"b"]) == 0
    drain.begin()
    assert drain.num_unaware([b"a", b"b"]) == 2
    drain.pinged(b"a")
    assert drain.num_unaware([b"a", b"b"]) == 2
    clock.advance(0.5)
    drain.pinged(b"a")
    assert drain.num_unaware([b"a", b"b"]) == 1
    assert drain.num_unaware([b"a"]) == 0
    drain.begin()
    assert drain.num_unaware([b"a"]) == 0


def test_draining_again_after_undrain_tells_everybody_anew() -> None:
    clock = MockClock()
    drain = Drain(3.0, clock)
    drain.begin()
    drain.pinged(b"a")
    clock.advance(0.5)
    drain.pinged(b"a")
    drain.end()
    assert not drain.active
    drain.begin()
    assert drain.num_unaware([b"a"]) == 1


def test_pings_that_waited_while_the_node_stood_still_count_as_one() -> None:
    """All of them were sent before any of them had its pong."""
    clock = MockClock()
    drain = Drain(3.0, clock)
    drain.begin()
    for _ in range(5):
        drain.pinged(b"a")
        clock.advance(0.001)
    assert drain.num_unaware([b"a"]) == 1
    clock.advance(0.5)
    drain.pinged(b"a")
    assert drain.num_unaware([b"a"]) == 0


def test_one_whose_lease_ended_may_come_back_for_one_more_lease() -> None:
    """Leases end first when a node goes on after standing still; what their holders sent is read after that."""
    clock = MockClock()
    drain = Drain(3.0, clock)
    drain.lease_ended(b"before")
    drain.begin()
    drain.lease_ended(b"b")
    assert drain.num_unaware([]) == 2
    clock.advance(2.9)
    assert drain.num_unaware([b"b"]) == 2
    clock.advance(0.2)
    assert drain.num_unaware([]) == 0
    for _ in range(2):
        drain.pinged(b"a")
        clock.advance(0.5)
    drain.lease_ended(b"a")
    assert drain.num_unaware([]) == 0, "it knows"


def test_ended_leases_are_forgotten_though_nobody_asks() -> None:
    """A node without an admin port is never asked whom it told."""
    clock = MockClock()
    drain = Drain(3.0, clock)
    for number in range(100):
        drain.lease_ended(b"%d" % number)
        clock.advance(1.0)
    assert len(drain._silent_until_s) <= 3


class _Logic:
    has_deadlines = False
    rests_until_s = 0.0

    def handle(self, event: object) -> None:
        raise AssertionError(event)

    def step(self) -> bool:
        return False

    def on_time(self, now_s: float) -> None:
        pass


def test_engine_answers_questions_on_its_thread_and_outlives_their_bugs() -> None:
    crashes: list[BaseException] = []
    loop = EngineLoop(_Logic(), lambda: None, crashes.append)
    loop.start()
    try:
        assert loop.ask(lambda: threading.current_thread().name).result(5) == "engine"
        with pytest.raises(ZeroDivisionError):
            loop.ask(lambda: 1 / 0).result(5)
        assert loop.ask(lambda: 7).result(5) == 7
    finally:
        loop.stop()
    assert crashes == []
