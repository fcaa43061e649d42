"""One part of a client's inputs: sent to one node, and again to another one if that fails. Router process, event loop.

               place             PoolResult
    WAITING ----------> AT NODE ------------> ended, with vectors
       ^                   |
       +-------------------+   the node failed or is lost: the next attempt
    At any time: the deadline, a disconnected client, or too many failures end it.

Parts are stateless at the nodes, so an attempt carries all inputs again. A part is a request of the router like a
generation: it is in the same table, admission queue, deadlines and stories.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from common.base.errors import EngineError, KvRelayError, Overloaded, Unavailable, from_code
from common.control.messages import Abort, AttemptFailed, AttemptKey, PeerRef
from common.control.pooling import PoolRequest, PoolResult
from router.policy import Fleet
from router.pooling.work import PoolWork
from router.requests import flow_events as f
from router.requests.attempt_placing import REPLACEMENT_WAIT_S
from router.requests.flow import backoff_s
from router.requests.queued_request import Siblings
from router.requests.router_state import RouterState
from router.requests.story import Story

log = logging.getLogger(__name__)

CLIENT_LEFT = "the client disconnected"


class PoolOutcome(NamedTuple):
    """How a part ended: with vectors, with an error, or (neither) because it was cancelled."""

    vectors: list[bytes] | None = None
    error: KvRelayError | None = None


class _PlaceNow(NamedTuple):
    """A wait is over: place the next attempt."""


class PoolPart:
    """One part. Call `enter`, then `start`; `on_end(part)` is called once, after `outcome` was set.

    Invariant: from then on the part is in no table of the router, and no node works on it.
    """

    def __init__(
        self,
        request_id: str,
        work: PoolWork,
        router: RouterState,
        *,
        max_attempts: int,
        deadline_s: float,
        on_end: Callable[[PoolPart], None],
        story: Story,
        siblings: Siblings,
    ) -> None:
        """siblings: all parts of the call."""
        self.request_id = request_id
        self.work = work
        self.outcome: PoolOutcome | None = None
        self.attempt = 0
        self._router = router
        self._fleet = router.fleets.by_role["prefill"]
        self._max_attempts = max_attempts
        self._deadline_s = deadline_s
        self._node_deadline_s: float | None = None
        """When to give up waiting for a node; None unless none was found since the wait began."""
        self._on_end = on_end
        self._story = story
        self._siblings = siblings
        self._admitted = False
        self._peer: PeerRef | None = None
        """The node that works on the current attempt."""
        self._avoid: set[str] = set()
        """Incarnations that failed this part."""
        self._failures = 0
        self._events: deque[f.Event | f.Pooled | _PlaceNow] = deque()
        self._busy = False
        self._why_cancelled = CLIENT_LEFT

    # -- for the dispatcher

    def enter(self) -> None:
        """Enter the router's tables."""
        self._router.enter(self.request_id, self, self._story)

    def start(self) -> None:
        """Place the first attempt; call once. Like `feed`, it never raises."""
        self._handle_all(_PlaceNow())

    def feed(self, event: f.Event | f.Pooled) -> None:
        """Handle one event; one that arises meanwhile is handled after it. A bug ends only this part."""
        self._handle_all(event)

    def cancel(self, why: str = CLIENT_LEFT) -> None:
        """End the part, because nobody needs it any more; if it has ended, do nothing. `why`: the reason that its story gives."""
        if self.outcome is None:
            self._why_cancelled = why
            self.feed(f.ClientGone())

    def _handle_all(self, event: f.Event | f.Pooled | _PlaceNow) -> None:
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events and self.outcome is None:
                self._handle(self._events.popleft())
        except Exception:
            log.exception("%s failed because of a bug", AttemptKey(self.request_id, self.attempt))
            self._end(PoolOutcome(error=KvRelayError("internal error in the router")))
        finally:
            self._events.clear()
            self._busy = False

    def _handle(self, event: f.Event | f.Pooled | _PlaceNow) -> None:
        match event:
            case _PlaceNow():
                self._place()
            case f.Pooled(incarnation, result):
                if self._is_current(incarnation, result.key):
                    self._take(result)
            case f.LegFailed(incarnation, failure):
                if self._is_current(incarnation, failure.key):
                    self._leg_failed(failure)
            case f.NodeLost(incarnation, reason):
                if self._peer is not None and self._peer.incarnation == incarnation:
                    self._node_lost(self._peer, reason)
            case f.GiveUp(error):
                self._end(PoolOutcome(error=error))
            case f.ClientGone():
                self._end(PoolOutcome())
            case _:
                raise AssertionError(f"{type(event).__name__} is no event of pooling")

    def _is_current(self, incarnation: str, key: AttemptKey) -> bool:
        return self._peer is not None and self._peer.incarnation == incarnation and key.attempt == self.attempt

    # -- placing

    def _place(self) -> None:
        router, fleet = self._router, self._fleet
        at = pick(fleet, self.work.longest, self._avoid | router.breakers.not_admitted())
        node = None if at is None else router.nodes.get(at)
        if node is None:
            self._wait_for_node()
            return
        if not self._admitted and not self._enter_queue():
            return
        self._node_deadline_s = None
        self.attempt += 1
        figures = fleet.node(node.incarnation)
        leg = {"node": node.node_id, "tokens_before": figures.backlog, "requests_before": figures.requests}
        self._story.add("decision", f"attempt {self.attempt}", {"mode": "pooled", "prefill": leg})
        router.breakers.chosen(node.incarnation)
        work, peer = self.work, node.record.peer
        request = PoolRequest(
            AttemptKey(self.request_id, self.attempt),
            list(work.inputs),
            work.normalize,
            work.dimensions,
            work.per_token,
            max(0.001, self._deadline_s - router.clock()),
        )
        self._peer = peer
        try:
            router.nodes.send(peer.incarnation, request, tokens=work.num_tokens)
        except Unavailable as error:
            self._node_lost(peer, error.message)
            return
        self._story.add("sent", "PoolRequest", {"node": node.node_id})
        router.metrics.attempt("pooled", self.attempt)
        router.table.first_token(self.request_id)

    def _enter_queue(self) -> bool:
        """Whether the part may go to a node at once; if not, it was refused or waits in the admission queue."""
        work = self.work
        entry = self._router.admission_queue.enter(
            self.request_id,
            None,
            prompt_tokens=work.num_tokens,
            max_tokens=0,
            admit=self._on_admitted,
            refuse=self._on_refused,
            priority=work.priority,
            tenant=work.tenant,
            siblings=self._siblings,
        )
        if entry is None:
            self._admitted = self._siblings.admitted = True
            return True
        self._story.add("queued", entry.reason, {"ahead": entry.ahead, "ahead_s": round(entry.ahead_s, 3)})
        return False

    def _on_admitted(self) -> None:
        self._admitted = self._siblings.admitted = True
        self._node_deadline_s = None  # nodes were found when it was queued
        self._handle_all(_PlaceNow())

    def _on_refused(self, error: Overloaded) -> None:
        self._handle_all(f.GiveUp(error))

    def _wait_for_node(self) -> None:
        """A new part is refused, unless this router stalled and its nodes are about to return; an older one waits."""
        router, error = self._router, Unavailable(f"no node of {self.work.model} is available now; try again")
        now_s = router.clock()
        if self._node_deadline_s is None:
            self._node_deadline_s = now_s + REPLACEMENT_WAIT_S
        new = not (self._siblings.admitted or router.nodes.rejoining)
        if new or now_s >= self._node_deadline_s:
            self._end(PoolOutcome(error=error))
            return
        self._story.add("parked", error.message)
        router.retry_wait.until_node(
            self.request_id,
            self._node_deadline_s - now_s,
            wake=lambda: self._handle_all(_PlaceNow()),
            give_up=lambda: self._handle_all(f.GiveUp(error)),
        )

    # -- the current attempt

    def _take(self, result: PoolResult) -> None:
        assert self._peer is not None
        expected = [self.work.result_bytes(each) for each in self.work.inputs]
        if [len(vector) for vector in result.vectors] != expected:
            error = EngineError(f"{self._peer.node_id} answered with vectors of another number or size")
            self._leg_failed(AttemptFailed(result.key, error.code, error.message))
            return
        self._router.breakers.succeeded(self._peer.incarnation)
        self._release()
        self._end(PoolOutcome(result.vectors))

    def _leg_failed(self, failure: AttemptFailed) -> None:
        peer = self._release()
        error = from_code(failure.code, failure.message)
        self._story.add("leg_failed", f"{error.code}: {error.message}", {"node": peer.node_id})
        self._router.breakers.failed(peer.incarnation, error)
        self._retry(peer, error)

    def _node_lost(self, peer: PeerRef, reason: str) -> None:
        self._abort()  # the node may be alive behind a broken link
        self._story.add("node_lost", reason, {"node": peer.node_id})
        self._retry(peer, Unavailable(f"node {peer.node_id} was lost: {reason}"))

    def _retry(self, peer: PeerRef, error: KvRelayError) -> None:
        self._failures += 1
        self._avoid.add(peer.incarnation)
        if not error.retryable:
            self._end(PoolOutcome(error=error))
        elif self._failures >= self._max_attempts:
            self._end(PoolOutcome(error=error.after_attempts(self.attempt)))
        else:
            self._story.add("retry", error.message, {"failures_in_a_row": self._failures})
            others = any(each not in self._avoid for each in self._fleet.incarnations)
            if self._failures == 1 and others:
                self._events.append(_PlaceNow())
                return
            wait_s = backoff_s(self._failures, random.random())
            self._router.retry_wait.pause(self.request_id, wait_s, lambda: self._handle_all(_PlaceNow()))

    def _release(self) -> PeerRef:
        """The node no longer works on the part."""
        peer, self._peer = self._peer, None
        assert peer is not None
        self._router.nodes.release(peer.incarnation, AttemptKey(self.request_id, self.attempt))
        self._router.admission_queue.release_soon()
        return peer

    def _abort(self) -> None:
        """Tell the node, if one works on the part, to stop."""
        if self._peer is not None:
            self._router.nodes.send(self._peer.incarnation, Abort(AttemptKey(self.request_id, self.attempt)))
            self._release()

    def _end(self, outcome: PoolOutcome) -> None:
        self.outcome = outcome
        self._abort()
        router, work = self._router, self.work
        router.leave(self.request_id)
        data = {"inputs": len(work.inputs), "prompt_tokens": work.num_tokens}
        if outcome.error is not None:
            self._story.add("failed", f"{outcome.error.code}: {outcome.error.message}", data)
        elif outcome.vectors is None:
            self._story.add("cancelled", self._why_cancelled, data)
        else:
            self._story.add("finished", data=data)
        router.stories.end(self._story)
        self._on_end(self)


def pick(fleet: Fleet, num_tokens: int, avoid: frozenset[str] | set[str]) -> str | None:
    """The incarnation with the least work of those that take inputs of `num_tokens`; one of `avoid` only if there is no other.
    None: there is no node.
    """
    fitting = [row for row in range(len(fleet)) if fleet.contexts[row] >= num_tokens]
    preferred = [row for row in fitting if fleet.incarnations[row] not in avoid]

    def work(row: int) -> tuple[float, float, float]:
        node = fleet.nodes[row]
        return node.slow_backlog, node.slow_requests, random.random()

    best = min(preferred or fitting, key=work, default=None)
    return None if best is None else fleet.incarnations[best]
