"""Placing one request's attempts: at once, after the admission queue, after a backoff, or when a node returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from support.mock_clock import MockClock

from common.base.errors import Overloaded, Unavailable
from common.control.ids import pack_ids
from common.control.messages import Abort, AttemptKey, DecodeRequest, EngineRequest, PeerRef, SamplingParams
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from router.policy import Decision, Fleet, LegDecision, Picked
from router.requests import flow_events as f
from router.requests.admission_queue import QueueEntry
from router.requests.attempt_placing import REPLACEMENT_WAIT_S, Attempts
from router.requests.placement import Placement, PlacementRequest
from router.requests.queued_request import Siblings, Tenant
from router.requests.request import GenerationRequest
from router.requests.router_state import RouterState
from router.requests.story import Story

ENGINE = EngineRequest(pack_ids([1, 2, 3]), SamplingParams(seed=0, max_tokens=8), "salt", 5)
LAYOUT = KVLayout("f", KVSpec.uniform(1, 1, 16, "float32"))
FIRST = f.Place(1, 3, frozenset())


class World:
    """One request's attempts among scripted parts of a router."""

    def __init__(self) -> None:
        self.clock = MockClock(100.0)
        self.calls: list[tuple[Any, ...]] = []
        self.answers: list[f.Event] = []
        self.asked: list[PlacementRequest] = []
        self.placement: Placement | Exception = placed("p", "d")
        self.entry: QueueEntry | Exception | None = None
        self.waits: dict[str, Callable[..., None]] = {}
        self.rejoining = False
        self.finishing = Fleet("decode")
        self.by_role = {"decode": Fleet("decode")}
        self.story = Story("r")
        self.token_ids: list[int] = []
        parts = dict.fromkeys(
            ("nodes", "fleets", "breakers", "placer", "metrics", "admission_queue", "retry_wait"), self
        )
        state = RouterState(
            **cast("dict[str, Any]", parts),
            stories=cast("Any", None),
            table=cast("Any", None),
            deadlines=cast("Any", None),
            clock=self.clock,
        )
        request = GenerationRequest(ENGINE, session="s", tenant=Tenant("t"))
        self.siblings = Siblings()
        self.attempts = Attempts(
            "r", request, self.token_ids, state, deadline_s=130.0, story=self.story, siblings=self.siblings
        )

    def place(self, wanted: f.Place = FIRST) -> f.Event | None:
        """The answer, if it comes at once."""
        before = len(self.answers)
        self.attempts.place(wanted, self.answers.append)
        return self.answers[-1] if len(self.answers) > before else None

    @property
    def told(self) -> list[str]:
        return [event for _, event, _, _ in self.story.events]

    # -- the parts

    def decode(self, *, begun: bool) -> Fleet:
        return self.finishing if begun else self.by_role["decode"]

    def decide(self, request: PlacementRequest) -> Placement:
        self.asked.append(request)
        if isinstance(self.placement, Exception):
            raise self.placement
        return self.placement

    def enter(self, request_id: str, decision: Decision, **about: Any) -> QueueEntry | None:
        self.waits = {"admit": about.pop("admit"), "refuse": about.pop("refuse")}
        self.calls.append(("enter", request_id, about))
        if isinstance(self.entry, Exception):
            raise self.entry
        return self.entry

    def pause(self, request_id: str, delay_s: float, then: Callable[[], None]) -> None:
        self.calls.append(("pause", request_id, delay_s))
        self.waits = {"then": then}

    def until_node(self, request_id: str, wait_s: float, **calls: Callable[[], None]) -> None:
        self.calls.append(("until_node", request_id, wait_s))
        self.waits = calls

    def get(self, incarnation: str) -> Any:
        record = type("Record", (), {"peer": peer(incarnation), "layout": LAYOUT})
        return type("Known", (), {"record": record, "kv_kind": LAYOUT.kv_kind})

    def not_admitted(self) -> frozenset[str]:
        return frozenset({"broken"})

    def chosen(self, incarnation: str) -> None:
        self.calls.append(("chosen", incarnation))

    def expect(self, placement: Placement, incarnations: list[str]) -> None:
        self.calls.append(("expect", *incarnations))

    def attempt(self, mode: str, number: int) -> None:
        self.calls.append(("attempt", mode, number))

    def send(self, incarnation: str, message: Any, **leg: float) -> None:
        self.calls.append(("send", incarnation, leg))


def peer(incarnation: str) -> PeerRef:
    return PeerRef(incarnation, incarnation, "tcp://x", [])


def placed(prefill: str | None, decode: str) -> Placement:
    """Where the prefill node has 2 of the prompt's tokens."""
    source = None if prefill is None else LegDecision(Picked(prefill, prefill, 2, 0.5), {})
    mode = "local" if source is None else "relayed"
    return Placement(
        Decision("least_load", mode, "why", LegDecision(Picked(decode, decode), {}), source), cast("Any", None), 40, 9
    )


def test_a_new_request_goes_at_once_and_is_counted_where_it_goes() -> None:
    world = World()
    assert world.place() == f.Placed(peer("p"), peer("d"), 30.0)
    about = {
        "prompt_tokens": 3,
        "max_tokens": 8,
        "priority": 5,
        "tenant": Tenant("t"),
        "siblings": world.siblings,
        "adapter": None,
    }
    assert world.calls == [
        ("enter", "r", about),
        ("chosen", "p"),
        ("chosen", "d"),
        ("expect", "p", "d"),
        ("attempt", "relayed", 1),
    ]
    assert world.attempts.decision == cast("Placement", world.placement).decision
    asked = world.asked[0]
    assert (list(asked.token_ids), asked.max_new_tokens, asked.session, asked.avoid) == ([1, 2, 3], 8, "s", {"broken"})
    assert not asked.begun


def test_what_each_leg_asks_of_its_node_is_sent_with_its_request() -> None:
    world = World()
    world.place()
    world.calls.clear()
    message = DecodeRequest(AttemptKey("r", 1), ENGINE, pack_ids(), None, 1.0)
    world.attempts.send("p", cast("Any", message))
    world.attempts.send("d", message)
    world.attempts.send("d", Abort(AttemptKey("r", 1)))
    assert world.calls == [
        ("send", "p", {"tokens": 38.0, "blocks": 3, "work_s": 0.5}),
        ("send", "d", {"tokens": 0.0, "blocks": 4, "work_s": 0.0}),
        ("send", "d", {}),
    ]


def test_a_later_attempt_counts_no_hits_of_nodes_that_never_reported_and_keeps_to_the_kv_of_its_tokens() -> None:
    world = World()
    world.place()
    world.token_ids += [7, 8]
    world.attempts.reported("p")
    world.place(f.Place(2, 5, frozenset({"x"}), backoff_s=0.1, at_once=True))
    asked = world.asked[1]
    assert (asked.unproven, asked.avoid, asked.begun) == ({"d"}, {"x", "broken"}, True)
    assert (list(asked.token_ids), asked.max_new_tokens) == ([1, 2, 3, 7, 8], 6)
    assert asked.kv_kind


def test_a_request_that_must_queue_is_placed_anew_when_it_is_admitted() -> None:
    world = World()
    world.entry = QueueEntry("every node is busy", 4, 1.25)
    assert world.place() is None
    assert world.told == ["queued"]
    assert world.story.events[0][2:] == ("every node is busy", {"ahead": 4, "ahead_s": 1.25})
    world.placement = placed(None, "d2")
    world.waits["admit"]()
    assert world.answers == [f.Placed(None, peer("d2"), 30.0)]
    assert [call[0] for call in world.calls].count("enter") == 1, "it passes the queue once"
    assert world.siblings.admitted


def test_a_request_that_the_queue_gives_up_or_refuses_is_unplaceable() -> None:
    world, late = World(), Overloaded("too late", retry_after_s=1.0)
    world.entry = late
    assert world.place() == f.Unplaceable(late)
    assert world.told == ["refused"]
    world.entry = QueueEntry("busy", 0, 0.0)
    assert world.place() is None
    world.waits["refuse"](late)
    assert world.answers == [f.Unplaceable(late)] * 2


def test_a_new_request_without_a_node_is_refused_at_once() -> None:
    world = World()
    world.placement = Unavailable("no decode node")
    answer = world.place()
    assert isinstance(answer, f.Unplaceable)
    assert answer.error.message == "no decode node"
    assert answer.error.__traceback__ is None, "its frames would keep the request alive"
    world.finishing.add("d", "d")
    answer = world.place()
    assert isinstance(answer, f.Unplaceable)
    assert "draining" in answer.error.message
    world.placement = Unavailable("no decode node has LoRA adapter 'a' now")
    world.by_role["decode"].add("e", "e")
    answer = world.place()
    assert isinstance(answer, f.Unplaceable)
    assert "LoRA adapter" in answer.error.message, "only some are draining"


def test_draining_nodes_may_get_what_nodes_have_begun_and_its_siblings_but_no_new_request() -> None:
    world = World()
    world.siblings.admitted = True  # as when it leaves the admission queue
    assert world.place() is not None
    assert world.place(f.Place(2, 3, frozenset())) is not None
    sibling = World()
    sibling.siblings.begun = world.siblings.begun
    assert sibling.place() is not None
    assert [request.begun for request in world.asked + sibling.asked] == [False, True, True]


@pytest.mark.parametrize("why", ["retry", "admitted", "sibling admitted", "rejoining"])
def test_a_request_that_was_admitted_waits_for_a_node_as_does_a_new_one_after_a_stall(why: str) -> None:
    world = World()
    world.placement = Unavailable("no decode node")
    world.attempts.admitted, world.rejoining = why == "admitted", why == "rejoining"
    world.siblings.admitted = why == "sibling admitted"
    wanted = f.Place(2, 3, frozenset()) if why == "retry" else FIRST
    assert world.place(wanted) is None
    assert world.told == ["parked"]
    world.clock.advance(10.0)
    world.waits["wake"]()  # in vain
    assert [call for call in world.calls if call[0] == "until_node"] == [
        ("until_node", "r", REPLACEMENT_WAIT_S),
        ("until_node", "r", REPLACEMENT_WAIT_S - 10.0),
    ]
    world.placement = placed(None, "d")
    world.waits["wake"]()
    assert world.answers == [f.Placed(None, peer("d"), 20.0)]


def test_the_wait_for_a_node_ends_with_the_error_and_does_not_begin_again() -> None:
    world = World()
    world.placement = Unavailable("no decode node")
    world.place(f.Place(2, 3, frozenset()))
    world.clock.advance(REPLACEMENT_WAIT_S)
    world.waits["wake"]()
    world.waits["give_up"]()
    assert [type(answer) for answer in world.answers] == [f.Unplaceable] * 2
    assert world.told == ["parked"]


def test_a_backoff_passes_before_the_attempt_unless_other_nodes_can_be_had() -> None:
    world = World()
    at_once = f.Place(2, 3, frozenset({"x"}), backoff_s=0.1, at_once=True)
    assert isinstance(world.place(at_once), f.Placed)
    assert world.place(at_once._replace(avoid=frozenset({"d"}))) is None
    assert world.place(at_once._replace(at_once=False)) is None
    assert [call for call in world.calls if call[0] == "pause"] == [("pause", "r", 0.1)] * 2
    assert world.told == ["backoff", "backoff"]
    assert [reason for _, _, reason, _ in world.story.events] == [
        "only nodes that just failed it are left",
        "not the first consecutive failure",
    ]
    assert len(world.asked) == 2, "the last one was not even decided"
    world.waits["then"]()
    assert len(world.answers) == 2, "after the backoff it goes, whatever node is left"


def test_a_bug_after_a_wait_ends_the_request_and_does_not_reach_what_ended_the_wait() -> None:
    world = World()
    world.place(f.Place(2, 3, frozenset(), backoff_s=0.1))
    world.placement = ZeroDivisionError()
    world.waits["then"]()
    assert isinstance(world.answers[0], f.GiveUp)
    with pytest.raises(ZeroDivisionError):
        world.place()
