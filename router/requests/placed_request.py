"""The states of one request before nodes have it and while they have it: events in, instructions out. Pure.

    PLACING --Found--> with nodes (states of the subclass) --> DONE
     |  ^                       |
     |  +-----------------------+  a leg failed or its node is lost: the next attempt
     |
     +--> QUEUED           until the nodes have use for more requests      --Ready--> PLACING
     +--> AWAITING_SAMPLE  for the first sample of its prompt              --Ready--> PLACING
     +--> AWAITING_NODE    for at most `REPLACEMENT_WAIT_S`                --Ready--> PLACING
     +--> BACKING_OFF      after a failure                                 --Ready--> PLACING

Generations (`router.requests.flow`), among them the samples of one prompt, and the parts of pooling calls
(`router.pooling.flow`) add what their nodes answer. Attempt numbers only grow, and messages of older attempts are ignored.

Invariants: exactly one terminal instruction is returned, and nothing after it; each `Send` that opens a leg is matched by
exactly one `Release` of it.

Retries: `max_attempts` consecutive failures end the request. The first retry starts at once if there is another node; each
further one waits twice as long as the one before. Without a node a new request is refused; one that was admitted waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, get_args

from common.base.errors import KvRelayError, PeerLost, TransferError, Unavailable, from_code
from common.base.transitions import unlisted
from common.control.messages import Abort, AttemptKey, PeerRef, Role
from router.requests import flow_events as f
from router.requests.queued_request import Siblings

REPLACEMENT_WAIT_S = 15.0
"""How long a request waits for a node, if none is left to continue it, before its client gets an error."""
_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 2.0


class State(StrEnum):  # strings hash in C; a plain enum's hash is a Python call for each event
    PLACING = "placing"
    """Nodes are chosen for the next attempt."""
    QUEUED = "queued"
    """It waits in the admission queue."""
    AWAITING_SAMPLE = "awaiting_sample"
    """Another sample of the prompt goes first."""
    AWAITING_NODE = "awaiting_node"
    """No node can serve it now."""
    BACKING_OFF = "backing_off"
    """The next attempt waits because the last ones failed."""
    PREFILL = "prefill"
    """The nodes have a generation's request; the attempt's first token is awaited."""
    HANDOVER = "handover"
    """The prefill node's token has arrived, but no token of the decode node."""
    DECODE = "decode"
    """Tokens come from the decode node; the prefill leg is over."""
    POOLING = "pooling"
    """A node has a part of a pooling call."""
    DONE = "done"


def backoff_s(failures: int, jitter: float) -> float:
    """How long to wait after this many consecutive failures; `jitter` in [0, 1) shortens it by up to a half."""
    return min(_MAX_BACKOFF_S, _BACKOFF_S * 2.0 ** min(failures - 1, 10)) * (1 - jitter / 2)


Row = dict[type, Callable[[Any, Any], f.Instructions]]
"""How one state handles each kind of event."""


def ignored(_reason: str) -> Callable[[Any, Any], f.Instructions]:
    """The handler of an event that may come in a state and does not matter there, with the reason."""
    return lambda _flow, _event: []


@dataclass
class Leg:
    """What one node does for the current attempt."""

    role: Role
    peer: PeerRef
    open: bool = True


class PlacedRequest:
    """One request. Call `start` once, then `handle` with every event; carry the instructions out in order."""

    def __init__(
        self,
        request_id: str,
        max_attempts: int = 3,
        siblings: Siblings | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`max_attempts`: consecutive failures that end the request."""
        self.request_id = request_id
        self.siblings = Siblings() if siblings is None else siblings
        self.state = State.PLACING
        self.attempt = 0
        self.key = AttemptKey(request_id, 0)
        """Key of the current attempt."""
        self.story: Sequence[object] = ()
        """What happened to it so far, for the report of an event that its table does not have."""
        self.admitted = False
        """It has passed the admission queue."""
        self._max_attempts = max_attempts
        self._jitter = jitter
        self._prefill: Leg | None = None
        self._decode: Leg | None = None
        self._avoid: set[str] = set()
        """Incarnations that failed this request; emptied when an attempt made tokens."""
        self._failures = 0
        """Consecutive failed attempts."""
        self._backoff_s = 0.0
        """How long the attempt must wait if there is no other node than those that failed."""
        self._node_deadline_s: float | None = None
        """When to give up waiting for a node. Set when no node was found, None again once one is."""

    def start(self) -> f.Instructions:
        """The first instructions."""
        return self._next_attempt()

    def handle(self, event: f.Event) -> f.Instructions:
        """The instructions for `event`. One that the table does not have is a bug: see `unlisted`."""
        handler = self._TABLE[self.state].get(type(event))
        if handler is None:
            unlisted(type(self).__name__, f"{type(event).__name__} while {self.state}", self.key, self.story)
            return []
        return handler(self, event)

    @property
    def prefill_peer(self) -> PeerRef | None:
        """The current attempt's prefill (or pooling) node; None before it is placed and with local prefill."""
        return None if self._prefill is None else self._prefill.peer

    # -- placing

    def _next_attempt(self) -> f.Instructions:
        self.attempt += 1
        self.key = AttemptKey(self.request_id, self.attempt)
        self._prefill = self._decode = None
        self._backoff_s = backoff_s(self._failures, self._jitter()) if self._failures else 0.0
        return self._back_off("not the first consecutive failure") if self._failures > 1 else self._choose()

    def _choose(self) -> f.Instructions:
        self.state = State.PLACING
        last = self._failures > 0 and self._failures + 1 >= self._max_attempts
        begun = self.attempt > 1 or self.siblings.begun
        return [f.Choose(frozenset(self._avoid), last, not self.admitted, begun)]

    def _back_off(self, why: str) -> f.Instructions:
        self.state = State.BACKING_OFF
        wait_s, self._backoff_s = self._backoff_s, 0.0
        return [f.BackOff(wait_s, why)]

    def _on_found(self, event: f.Found) -> f.Instructions:
        prefill, decode, timeout_s = event
        if self._backoff_s and any(at is not None and at.incarnation in self._avoid for at in (prefill, decode)):
            return self._back_off("only nodes that just failed it are left")
        self.admitted = self.siblings.admitted = self.siblings.begun = True
        self._node_deadline_s = None
        self._prefill = None if prefill is None else Leg("prefill", prefill)
        self._decode = None if decode is None else Leg("decode", decode)
        return [f.Admit(), *self._open(timeout_s)]

    def _open(self, timeout_s: float) -> f.Instructions:
        """Ask the nodes of the legs. `timeout_s`: what is left until the request's deadline."""
        raise NotImplementedError

    def _on_no_node(self, event: f.NoNode) -> f.Instructions:
        """Wait for a node. If a wake-up finds none again, the first deadline stays."""
        if not (self.siblings.admitted or event.rejoining):
            return self._end(f.Fail(event.error))
        if self._node_deadline_s is None:
            self._node_deadline_s = event.now_s + REPLACEMENT_WAIT_S
        elif event.now_s >= self._node_deadline_s:
            return self._end(f.Fail(event.error))
        self.state = State.AWAITING_NODE
        return [f.AwaitNode(self._node_deadline_s - event.now_s, event.error)]

    def _wait(self, state: State) -> f.Instructions:
        self.state = state
        return []

    def _on_turn(self, _: f.Ready) -> f.Instructions:
        """It leaves the admission queue."""
        self.admitted = self.siblings.admitted = True
        self._node_deadline_s = None  # nodes were found when it was queued
        return self._choose()

    # -- failures

    def _on_leg_failed(self, event: f.LegFailed) -> f.Instructions:
        leg = self._leg(event.incarnation)
        if leg is None or event.failure.key.attempt != self.attempt:
            return []
        error = from_code(event.failure.code, event.failure.message)
        blamed = self._blamed(leg, error)
        failed: f.Instructions = [
            *self._close_leg(leg),
            self._note("leg_failed", leg, f"{error.code}: {error.message}", blamed=blamed.peer.node_id),
            f.Blame(blamed.peer.incarnation, error),
        ]
        return failed + self._retry(error, blamed)

    def _blamed(self, reporter: Leg, error: KvRelayError) -> Leg:
        """The leg to blame. If the reporter lost its peer, that is the other leg. Any other failed transfer does not tell
        which end is at fault; the prefill node is blamed, because it can be replaced while the decode node is kept. Every
        other error is the reporter's own.
        """
        if self._prefill is None or self._decode is None or not isinstance(error, TransferError):
            return reporter
        if isinstance(error, PeerLost) and reporter is self._prefill:
            return self._decode
        return self._prefill

    def _on_node_lost(self, event: f.NodeLost) -> f.Instructions:
        leg = self._leg(event.incarnation)
        if leg is None:
            return []
        error = Unavailable(f"node {leg.peer.node_id} was lost: {event.reason}")
        # The node may be alive behind a broken link: the abort waits for a new link.
        gone: f.Instructions = [*self._close_leg(leg), f.Send(leg.peer, Abort(self.key))]
        return [*gone, self._note("node_lost", leg, event.reason), *self._retry(error, leg)]

    def _retry(self, error: KvRelayError, blamed: Leg | None, **noted: object) -> f.Instructions:
        """The attempt failed: begin another one, or end the request. `noted`: for the story."""
        self._failures += 1
        if blamed is not None:
            self._avoid.add(blamed.peer.incarnation)
        if not error.retryable:
            return self._end(f.Fail(error))
        if self._failures >= self._max_attempts:
            return self._end(f.Fail(error.after_attempts(self.attempt)))
        note = f.Note("retry", error.message, {"failures_in_a_row": self._failures, **noted})
        return [*self._close_legs(), note, *self._next_attempt()]

    def _note(self, event: str, leg: Leg, reason: str = "", **data: object) -> f.Note:
        about = {"attempt": self.attempt, "node": leg.peer.node_id, "role": leg.role, **data}
        return f.Note(event, reason, about)

    # -- legs and the end

    def _leg(self, incarnation: str) -> Leg | None:
        """The open leg at this incarnation."""
        for leg in (self._prefill, self._decode):
            if leg is not None and leg.open and leg.peer.incarnation == incarnation:
                return leg
        return None

    def _close_leg(self, leg: Leg | None) -> f.Instructions:
        if leg is None or not leg.open:
            return []
        leg.open = False
        return [f.Release(leg.peer.incarnation, self.key)]

    def _close_legs(self) -> f.Instructions:
        """Abort the open legs."""
        instructions: f.Instructions = []
        for leg in (self._prefill, self._decode):
            if leg is not None and leg.open:
                instructions += [f.Send(leg.peer, Abort(self.key)), *self._close_leg(leg)]
        return instructions

    def _end(self, last: f.Terminal) -> f.Instructions:
        instructions = self._close_legs()
        self.state = State.DONE
        return [*instructions, last]

    _ENDINGS: ClassVar[Row] = {
        f.ClientGone: lambda self, _: self._end(f.Cancelled()),
        f.GiveUp: lambda self, event: self._end(f.Fail(event.error)),
        f.StopFound: lambda self, _: self._end(f.Finish("stop")),
    }
    _WITHOUT_NODES: ClassVar[Row] = {
        **_ENDINGS,
        **dict.fromkeys((f.Chunk, f.Pooled, f.LegFailed), ignored("it is a late message of an older attempt")),
        f.NodeLost: ignored("no node works on the request"),
    }
    _WAITING: ClassVar[Row] = {**_WITHOUT_NODES, f.Ready: lambda self, _: self._choose()}
    _WITH_NODES: ClassVar[Row] = {**_ENDINGS, f.LegFailed: _on_leg_failed, f.NodeLost: _on_node_lost}
    _TABLE: ClassVar[dict[State, Row]] = {
        State.PLACING: {
            **_WITHOUT_NODES,
            f.Found: _on_found,
            f.NoNode: _on_no_node,
            f.Queued: lambda self, _: self._wait(State.QUEUED),
            f.SampleAwaited: lambda self, _: self._wait(State.AWAITING_SAMPLE),
        },
        State.QUEUED: {**_WITHOUT_NODES, f.Ready: _on_turn},
        **dict.fromkeys((State.AWAITING_SAMPLE, State.AWAITING_NODE, State.BACKING_OFF), _WAITING),
        State.DONE: dict.fromkeys(get_args(f.Event), ignored("the request has ended")),
    }
