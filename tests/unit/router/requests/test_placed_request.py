"""The machine of one request's attempts: at once, after the admission queue, after a backoff, or when a node returns."""

from __future__ import annotations

import pytest

from common.base.errors import InvalidTransition, KvRelayError, Overloaded, Unavailable
from common.base.transitions import unlisted_counts
from common.base.variables import STRICT_STATES
from common.control.identities import pack_ids
from common.control.messages import EngineRequest, PeerRef, SamplingParams
from router.requests.flow import Flow
from router.requests.flow_events import (
    Admit,
    AwaitNode,
    BackOff,
    Choose,
    ClientGone,
    Fail,
    Found,
    GiveUp,
    Instructions,
    NodeLost,
    NoNode,
    Queued,
    Ready,
    SampleAwaited,
    Send,
)
from router.requests.placed_request import REPLACEMENT_WAIT_S, State
from router.requests.queued_request import Siblings

P, D, D2 = (PeerRef(name, f"inc-{name}", "tcp://x", []) for name in ("p", "d", "d2"))
FIRST = Choose(frozenset(), is_new=True)


class World:
    """One request, to whose `Choose`s the answers are scripted."""

    def __init__(self, max_attempts: int = 3) -> None:
        self.siblings = Siblings()
        engine = EngineRequest(pack_ids([1, 2]), SamplingParams(seed=0, max_tokens=5))
        self.flow = Flow("r", engine, max_attempts, self.siblings, jitter=lambda: 0.0)
        assert self.flow.start() == [FIRST]

    def place(self, decode: PeerRef = D) -> Instructions:
        return self.flow.handle(Found(None, decode, 9.0))

    def no_node(self, now_s: float = 100.0, *, rejoining: bool = False) -> Instructions:
        return self.flow.handle(NoNode(Unavailable("no decode node"), now_s, rejoining))

    def lose(self, peer: PeerRef = D) -> Instructions:
        return self.flow.handle(NodeLost(peer.incarnation, "gone"))


def error_of(instructions: Instructions) -> KvRelayError:
    (last,) = instructions
    assert isinstance(last, Fail)
    return last.error


def test_a_new_request_goes_at_once() -> None:
    world = World()
    first, second = world.place()
    assert first == Admit()
    assert isinstance(second, Send)
    assert world.flow.admitted


def test_a_request_that_must_queue_is_placed_anew_when_it_is_admitted() -> None:
    world = World()
    assert world.flow.handle(Queued()) == []
    assert world.flow.state is State.QUEUED
    assert not world.siblings.admitted
    assert world.flow.handle(Ready()) == [Choose(frozenset())], "it passes the queue once"
    assert world.siblings.admitted


@pytest.mark.parametrize("queued", [False, True])
def test_a_request_that_the_queue_refuses_ends(queued: bool) -> None:
    world, late = World(), Overloaded("too late", retry_after_s=1.0)
    if queued:
        world.flow.handle(Queued())
    assert error_of(world.flow.handle(GiveUp(late))) is late


def test_a_sample_that_waits_for_another_is_still_new_when_it_asks_again() -> None:
    world = World()
    assert world.flow.handle(SampleAwaited()) == []
    assert world.flow.state is State.AWAITING_SAMPLE
    assert world.flow.handle(Ready()) == [FIRST]


def test_a_new_request_without_a_node_is_refused_at_once() -> None:
    world = World()
    assert error_of(world.no_node()).message == "no decode node"
    assert world.flow.state is State.DONE


@pytest.mark.parametrize("why", ["retry", "admitted", "sibling admitted", "rejoining"])
def test_a_request_that_was_admitted_waits_for_a_node_as_does_a_new_one_after_a_stall(why: str) -> None:
    world = World()
    world.siblings.admitted = why == "sibling admitted"
    if why == "admitted":
        world.flow.handle(Queued())
        world.flow.handle(Ready())
    elif why == "retry":
        world.place()
        world.lose()
    (wait,) = world.no_node(rejoining=why == "rejoining")
    assert isinstance(wait, AwaitNode)
    assert wait.wait_s == REPLACEMENT_WAIT_S
    assert isinstance(world.flow.handle(Ready())[0], Choose)
    (wait,) = world.no_node(110.0, rejoining=why == "rejoining")
    assert isinstance(wait, AwaitNode)
    assert wait.wait_s == REPLACEMENT_WAIT_S - 10.0, "being woken in vain does not prolong the wait"
    world.flow.handle(Ready())
    assert isinstance(world.place(D2)[0], Admit)


def test_the_wait_for_a_node_ends_with_the_error_and_does_not_begin_again() -> None:
    world = World()
    world.place()
    world.lose()
    world.no_node()
    world.flow.handle(Ready())
    assert error_of(world.no_node(100.0 + REPLACEMENT_WAIT_S)).message == "no decode node"
    other, late = World(), Unavailable("late")
    other.place()
    other.lose()
    other.no_node()
    assert error_of(other.flow.handle(GiveUp(late))) is late


def test_the_wait_for_a_node_before_the_queue_does_not_shorten_that_behind_it() -> None:
    world = World()
    world.no_node(rejoining=True)
    world.flow.handle(Ready())
    world.flow.handle(Queued())
    world.flow.handle(Ready())
    (wait,) = world.no_node(160.0)
    assert isinstance(wait, AwaitNode)
    assert wait.wait_s == REPLACEMENT_WAIT_S


def test_a_backoff_passes_before_the_attempt_unless_other_nodes_can_be_had() -> None:
    world = World()
    world.place()
    assert world.lose()[-1] == Choose(frozenset({"inc-d"}), begun=True)
    assert world.place(D) == [BackOff(0.1, "only nodes that just failed it are left")]
    assert world.flow.handle(Ready()) == [Choose(frozenset({"inc-d"}), begun=True)]
    assert isinstance(world.place(D)[0], Admit), "after the backoff it goes, whatever node is left"
    assert world.lose()[-1] == BackOff(0.2, "not the first consecutive failure")
    assert world.flow.handle(Ready()) == [Choose(frozenset({"inc-d"}), last=True, begun=True)]
    world.place(D2)
    last = world.lose(D2)[-1]
    assert isinstance(last, Fail)
    assert "after 3 attempts" in last.error.message


def test_what_nodes_have_begun_is_known_to_siblings() -> None:
    world = World()
    world.place()
    sibling = Flow("r-1", world.flow.request, siblings=world.siblings)
    assert sibling.start() == [Choose(frozenset(), is_new=True, begun=True)]


def test_nothing_follows_the_end() -> None:
    world = World()
    world.flow.handle(ClientGone())
    for event in (Ready(), Found(None, D, 9.0), NodeLost("inc-d", "late"), ClientGone()):
        assert world.flow.handle(event) == []


def test_an_event_that_a_state_does_not_have_raises_with_the_story(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.flow.story = ["arrived"]
    with pytest.raises(InvalidTransition, match=r"Flow r#1: Ready while placing is not in its table.*arrived"):
        world.flow.handle(Ready())
    monkeypatch.delenv(STRICT_STATES)
    monkeypatch.setattr("common.base.transitions.unlisted_counts", counts := unlisted_counts.copy())
    assert world.flow.handle(Ready()) == []
    assert counts["Flow: Ready while placing"] == 1
