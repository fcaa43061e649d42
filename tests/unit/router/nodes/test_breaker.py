"""Circuit breakers of nodes: when they open, how they close, what they ignore."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.base.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineError,
    HandshakeRefused,
    NoFiniteLogits,
    Overloaded,
    PeerLost,
    TransferTimedOut,
)
from router.nodes.breaker import MAX_OPEN_S, PROBE_EVERY_S, Breakers

ERROR = EngineError("the step failed")


class Bench:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.breakers = Breakers(clock=lambda: self.now_s)

    def fail(self, times: int = 1, apart_s: float = 1.0) -> None:
        for _ in range(times):
            self.now_s += apart_s
            self.breakers.failed("a", ERROR)

    @property
    def state(self) -> str:
        return self.breakers.view("a").state

    @property
    def admitted(self) -> bool:
        return "a" not in self.breakers.not_admitted()


def test_failures_in_a_row_open_it_for_a_while_and_it_closes_after_good_probes() -> None:
    bench = Bench()
    bench.fail(2)
    bench.breakers.succeeded("a")
    bench.fail(2)
    assert (bench.state, bench.admitted) == ("closed", True), "a success in between starts the count anew"
    bench.fail()
    assert (bench.state, bench.admitted) == ("open", False)
    assert "the step failed" in bench.breakers.view("a").reason
    bench.now_s += 5.0
    assert (bench.state, bench.admitted) == ("half_open", True)
    bench.breakers.chosen("a")
    assert not bench.admitted, "one probe at a time"
    bench.now_s += 1.0
    assert bench.admitted, "a probe that was never answered does not block the next"
    bench.breakers.succeeded("a")
    assert bench.state == "half_open"
    bench.breakers.succeeded("a")
    assert (bench.state, bench.admitted) == ("closed", True)
    assert bench.breakers.times_opened == 1


def test_failed_probe_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    bench = Bench()
    bench.fail(3)
    for open_s in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):
        bench.now_s += open_s - 0.01
        assert bench.state == "open"
        bench.now_s += 0.02
        assert bench.state == "half_open"
        bench.fail()
        assert bench.state == "open"


def test_a_broken_step_that_takes_many_attempts_with_it_counts_once() -> None:
    bench = Bench()
    bench.fail()
    bench.fail(50, apart_s=0.004)
    assert (bench.state, bench.breakers.view("a").failures) == ("closed", 1)


def test_what_is_not_the_nodes_fault_does_not_count_and_what_may_be_does() -> None:
    bench = Bench()
    for error in (
        BadRequest("too long"),
        Overloaded("full"),
        HandshakeRefused("dtype"),
        DeadlineExceeded("the request's"),
    ):
        for _ in range(5):
            bench.now_s += 1.0
            bench.breakers.failed("a", error)
    assert bench.breakers.view("a").failures == 0
    # A node with broken memory fails every request so, and faster than any other node answers: it would get most of them.
    for error in (PeerLost("gone"), TransferTimedOut("the transfer's own"), NoFiniteLogits("of many sequences")):
        bench = Bench()
        for _ in range(3):
            bench.now_s += 1.0
            bench.breakers.failed("a", error)
        assert bench.state == "open"


def test_nodes_that_are_gone_are_forgotten() -> None:
    bench = Bench()
    bench.fail(3)
    bench.breakers.keep({"b"})
    assert (bench.state, bench.breakers.not_admitted()) == ("closed", frozenset())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["fail", "ok", "chosen"]), st.floats(0.0, 20.0)), max_size=60))
def test_whatever_happens_a_node_is_admitted_again(events: list[tuple[str, float]]) -> None:
    bench = Bench()
    for event, wait_s in events:
        bench.now_s += wait_s
        match event:
            case "fail":
                bench.breakers.failed("a", ERROR)
            case "ok":
                bench.breakers.succeeded("a")
            case _:
                bench.breakers.chosen("a")
        assert bench.state != "closed" or bench.admitted
        assert bench.state != "open" or not bench.admitted
    bench.now_s += MAX_OPEN_S + PROBE_EVERY_S
    assert bench.admitted
