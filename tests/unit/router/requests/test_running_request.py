"""One generation among scripted parts of a router: what it asks of them, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

import pytest
from support.mock_clock import MockClock

from common.base.errors import Overloaded, Unavailable
from common.control.identities import pack_ids
from common.control.messages import (
    Abort,
    AttemptStats,
    DecodeRequest,
    EngineRequest,
    PeerRef,
    SamplingParams,
    TokenChunk,
)
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from router.policy import Decision, Fleet, LegDecision, Query
from router.requests import flow_events as f
from router.requests.admission_queue import QueueEntry
from router.requests.generation import Generation
from router.requests.placed_request import REPLACEMENT_WAIT_S, State
from router.requests.placement import BlockNames, Placement
from router.requests.queued_request import QueuedRequest, Siblings, Tenant
from router.requests.request import GenerationRequest
from router.requests.router_state import RouterState
from router.requests.story import Stories

ENGINE = EngineRequest(pack_ids([1, 2, 3]), SamplingParams(seed=0, max_tokens=8), "salt", 5)
LAYOUT = KVLayout("f", KVSpec.uniform(1, 1, 16, "float32"))


class World:
    """One generation among scripted parts of a router."""

    def __init__(self) -> None:
        self.clock = MockClock(100.0)
        self.calls: list[tuple[Any, ...]] = []
        self.asked: list[tuple[Query, list[int], set[str]]] = []
        self.placement: Placement | Exception = placed("p", "d")
        self.entry: QueueEntry | Exception | None = None
        self.waits: dict[str, Callable[..., None]] = {}
        self.rejoining = False
        self.finishing = Fleet("decode")
        self.by_role = {"decode": Fleet("decode")}
        parts = dict.fromkeys(
            (
                *("nodes", "fleets", "breakers", "placer", "metrics"),
                *("deadlines", "admission_queue", "retry_wait"),
            ),
            self,
        )
        state = RouterState(
            **cast("dict[str, Any]", parts), stories=Stories(), requests={}, unanswered=set(), clock=self.clock
        )
        self.siblings = Siblings()
        self.request = Generation(
            "r",
            GenerationRequest(ENGINE, session="s", tenant=Tenant("t"), detokenize=False),
            cast("Any", None),
            state,
            max_attempts=3,
            deadline_s=130.0,
            on_news=lambda: None,
            siblings=self.siblings,
        )

    def fail(self, incarnation: str = "d") -> None:
        self.request.feed(f.NodeLost(incarnation, "gone"))

    @property
    def told(self) -> list[str]:
        return [event for _, event, _, _ in self.request.story.events[1:]]

    @property
    def error(self) -> str:
        assert self.request.outcome is not None
        assert self.request.outcome.error is not None
        return self.request.outcome.error.message

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]

    # -- the parts

    def decode(self, *, begun: bool) -> Fleet:
        return self.finishing if begun else self.by_role["decode"]

    def decide(self, query: Query, names: BlockNames, unproven: Collection[str]) -> Placement:
        token_ids = cast("Any", names).keywords["token_ids"]
        self.asked.append((query, list(token_ids), set(unproven)))
        if isinstance(self.placement, Exception):
            raise self.placement
        return self.placement

    def enter(self, request: QueuedRequest, decision: Decision, **waits: Any) -> QueueEntry | None:
        self.waits = waits
        self.calls.append(("enter", request))
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
        self.calls.append(("send", incarnation, "abort" if isinstance(message, Abort) else leg))

    def add(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        """What else is told to the parts."""
        return lambda *_: None


def peer(incarnation: str) -> PeerRef:
    return PeerRef(incarnation, incarnation, "tcp://x", [])


def placed(prefill: str | None, decode: str) -> Placement:
    """Where the prefill node has 2 of the prompt's tokens."""
    source = None if prefill is None else LegDecision(prefill, prefill, {}, 2, 0.5)
    mode = "local" if source is None else "relayed"
    return Placement(
        Decision("least_load", mode, "why", LegDecision(decode, decode, {}), source), cast("Any", None), 40, 9
    )


def test_a_new_request_goes_at_once_and_is_counted_where_it_goes() -> None:
    world = World()
    world.request.start()
    queued = QueuedRequest("r", 3, 8, priority=5, tenant=Tenant("t"), siblings=world.siblings)
    assert world.calls == [
        ("enter", queued),
        ("chosen", "p"),
        ("chosen", "d"),
        ("expect", "p", "d"),
        ("attempt", "relayed", 1),
        ("send", "d", {"tokens": 0.0, "blocks": 4, "work_s": 0.0}),
        ("send", "p", {"tokens": 38.0, "blocks": 3, "work_s": 0.5}),
    ]
    assert world.told == ["decision", "sent", "sent"]
    assert world.request.decision == cast("Placement", world.placement).decision
    query, token_ids, unproven = world.asked[0]
    assert (query.num_tokens, query.max_new_tokens, query.session, query.avoid) == (3, 8, "s", {"broken"})
    assert (token_ids, unproven, query.begun) == ([1, 2, 3], set(), False)


def test_a_later_attempt_counts_no_hits_of_nodes_that_never_reported_and_keeps_to_the_kv_of_its_tokens() -> None:
    world = World()
    world.request.start()
    world.request.feed(f.Chunk("p", TokenChunk(world.request.flow.key, 0, [7, 8], stats=AttemptStats())))
    world.placement = placed(None, "d2")
    world.fail()
    query, token_ids, unproven = world.asked[1]
    assert (unproven, query.avoid, query.begun) == ({"d"}, {"d", "broken"}, True)
    assert (token_ids, query.num_tokens, query.max_new_tokens) == ([1, 2, 3, 7, 8], 5, 6)
    assert query.kv_kind


def test_a_request_that_must_queue_is_placed_anew_when_it_is_admitted() -> None:
    world = World()
    world.entry = QueueEntry("every node is busy", 4, 1.25)
    world.request.start()
    assert world.told == ["queued"]
    assert world.request.story.events[1][2:] == ("every node is busy", {"ahead": 4, "ahead_s": 1.25})
    assert world.request.decision is None
    world.placement = placed(None, "d2")
    world.waits["admit"]()
    assert [call[1] for call in world.called("send")] == ["d2"]
    assert len(world.called("enter")) == 1


def test_a_request_that_the_queue_gives_up_or_refuses_ends() -> None:
    world, late = World(), Overloaded("too late", retry_after_s=1.0)
    world.entry = late
    world.request.start()
    assert world.told == ["refused", "failed"]
    world = World()
    world.entry = QueueEntry("busy", 0, 0.0)
    world.request.start()
    world.waits["refuse"](late)
    assert world.error == "too late"


def test_the_error_without_a_node_says_why() -> None:
    def error(why: str, *, finishing: bool = False, usable: bool = False) -> str:
        world = World()
        world.placement = Unavailable(why)
        if finishing:
            world.finishing.add("d", "d")
        if usable:
            world.by_role["decode"].add("e", "e")
        world.request.start()
        assert world.placement.__traceback__ is None or finishing, "its frames would keep the request alive"
        return world.error

    assert error("no decode node") == "no decode node"
    assert "draining" in error("no decode node", finishing=True)
    assert "LoRA adapter" in error("no decode node has LoRA adapter 'a' now", finishing=True, usable=True)


def test_an_admitted_request_waits_until_a_node_returns() -> None:
    world = World()
    world.request.start()
    world.placement = Unavailable("no decode node")
    world.fail()
    assert world.told[-1] == "waiting_for_node"
    world.clock.advance(10.0)
    world.waits["wake"]()  # in vain
    assert [call[2] for call in world.called("until_node")] == [REPLACEMENT_WAIT_S, REPLACEMENT_WAIT_S - 10.0]
    world.placement = placed(None, "d2")
    world.waits["wake"]()
    assert world.request.flow.state is State.PREFILL
    world.placement = Unavailable("no decode node")
    world.fail("d2")
    world.waits["then"]()
    world.waits["give_up"]()
    assert world.error == "no decode node"


def test_a_backoff_passes_if_only_the_node_that_failed_is_left() -> None:
    world = World()
    world.request.start()
    world.fail()
    assert world.told[-1] == "backoff"
    assert len(world.called("pause")) == 1
    world.waits["then"]()
    assert world.told[-1] == "sent"


def test_a_bug_after_a_wait_ends_the_request_and_does_not_reach_what_ended_the_wait() -> None:
    world = World()
    world.request.start()
    world.fail()
    world.placement = ZeroDivisionError()
    world.waits["then"]()
    assert world.error == "internal error in the router"


def test_a_node_that_cannot_be_reached_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    def send(incarnation: str, message: Any, **_: float) -> None:
        if isinstance(message, DecodeRequest) and incarnation == "d":
            world.placement = placed(None, "d2")
            raise Unavailable("no link")

    monkeypatch.setattr(world, "send", send)
    world.request.start()
    assert world.told == ["decision", "sent", "node_lost", "retry", "decision", "sent"]
