"""Placing the attempts of one request: choose nodes, or wait in the admission queue, for a node, or for a backoff.

Runs on the router's event loop. How a placement changes the state of the request is decided by `Flow`, not here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from common.base.errors import KvRelayError, Overloaded, Unavailable
from common.control.identities import AttemptKey
from common.control.ids import pack_ids
from common.control.messages import Abort, DecodeRequest, PrefillRequest
from router.policy import Decision
from router.requests import flow_events as f
from router.requests.placement import HashChain, Placement, PlacementRequest
from router.requests.queued_request import Siblings
from router.requests.request import GenerationRequest
from router.requests.router_state import RouterState
from router.requests.shared_prompt import SharedPrompt
from router.requests.story import Story

log = logging.getLogger(__name__)

REPLACEMENT_WAIT_S = 15.0
"""How long a request waits for a node, if none is left to continue it, before its client gets an error."""

Answer = Callable[[f.Event], None]
"""Receives the answer to `Place`: `Placed`, `Unplaceable`, or `GiveUp` after a bug."""


class Attempts:
    """One request's attempts. Invariant: the request waits for at most one thing at a time, and for nothing once it is
    removed from the tables of `RouterState`.
    """

    __slots__ = (
        "_chain",
        "_deadline_s",
        "_kv_kind",
        "_node_deadline_s",
        "_placement",
        "_request",
        "_router",
        "_siblings",
        "_story",
        "_token_ids",
        "_unproven",
        "admitted",
        "decision",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        request: GenerationRequest,
        token_ids: list[int],
        router: RouterState,
        *,
        deadline_s: float,
        story: Story,
        siblings: Siblings,
    ) -> None:
        """`token_ids`: what was generated so far; grows with the request. `deadline_s`: when the request must be over."""
        self.request_id = request_id
        self.admitted = False
        """It has passed the admission queue."""
        self._request = request
        self._token_ids = token_ids
        self._router = router
        self._deadline_s = deadline_s
        self._story = story
        self._siblings = siblings
        self._chain = HashChain(request.engine.cache_salt, request.engine.lora_id)
        self._placement: Placement | None = None
        self.decision: Decision | None = None
        """The decision of the latest placed attempt."""
        self._node_deadline_s: float | None = None
        """When to give up waiting for a node; None unless none was found since the wait began."""
        self._kv_kind = ""
        """KV kind of the node that generates, or generated, the first token."""
        self._unproven: set[str] = set()
        """Incarnations that got the prompt but have not reported yet: the blocks expected there may be missing."""

    def place(self, wanted: f.Place, answer: Answer) -> None:
        """Choose nodes and answer, now or later.

        If there is no node, a new request is refused at once, unless this router stalled and its nodes are about to
        reconnect. One that was admitted, or has a sibling that was, waits for a node.
        """
        if wanted.backoff_s and not wanted.at_once:
            self._back_off(wanted, answer, "not the first consecutive failure")
            return
        request = self._placement_request(wanted)
        shared = self._shared_prompt()
        if shared is not None:
            decode = self._router.fleets.decode(begun=request.begun)
            usable = shared.holder not in request.avoid and decode.row(shared.holder) is not None
            again = partial(self._place_again, wanted, answer)
            if not shared.may_place(self.request_id, holder_usable=usable, wake=again):
                self._wait_for_sample()
                return
            request = replace(request, holder=shared.holder)
        try:
            placement = self._router.placer.decide(request)
        except Unavailable as error:
            self._on_no_node(wanted, answer, error)
            return
        decision = placement.decision
        if wanted.attempt == 1 and not self.admitted and not self._enter_queue(wanted, answer, decision):
            return
        incarnations = [leg.picked.incarnation for leg in (decision.prefill, decision.decode) if leg is not None]
        if wanted.backoff_s and not wanted.avoid.isdisjoint(incarnations):
            self._back_off(wanted, answer, "only nodes that just failed it are left")
            return
        answer(self._take(wanted, placement, incarnations))

    def _shared_prompt(self) -> SharedPrompt | None:
        """What the request's samples share. One that has generated more than its prompt has more to compute than to share."""
        long = len(self._token_ids) > len(self._request.engine.prompt_ids)
        return None if long else self._request.shared

    def _placement_request(self, wanted: f.Place) -> PlacementRequest:
        request, token_ids = self._request, self._token_ids
        return PlacementRequest(
            request.engine.prompt_ids + pack_ids(token_ids),
            self._chain,
            max_new_tokens=request.engine.sampling.max_tokens - len(token_ids),
            session=request.session,
            avoid=wanted.avoid | self._router.breakers.not_admitted(),
            last=wanted.last,
            unproven=frozenset(self._unproven),
            kv_kind=self._kv_kind if token_ids else "",
            begun=wanted.attempt > 1 or self._siblings.begun,
            adapter=request.engine.adapter,
        )

    def _take(self, wanted: f.Place, placement: Placement, incarnations: list[str]) -> f.Placed:
        router, decision = self._router, placement.decision
        for incarnation in incarnations:
            router.breakers.chosen(incarnation)
        self._unproven.update(incarnations)
        router.placer.expect(placement, incarnations)
        self._placement, self.decision, self._node_deadline_s = placement, decision, None
        self._siblings.begun = True
        decode = router.nodes.get(decision.decode.picked.incarnation)
        prefill = None if decision.prefill is None else router.nodes.get(decision.prefill.picked.incarnation)
        assert decode is not None
        if not self._token_ids:
            self._kv_kind = decode.kv_kind
        router.metrics.attempt(decision.mode, wanted.attempt)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s goes to %s", AttemptKey(self.request_id, wanted.attempt), decision.explain())
        timeout_s = max(0.001, self._deadline_s - router.clock())
        return f.Placed(None if prefill is None else prefill.record.peer, decode.record.peer, timeout_s)

    # -- waiting

    def _wait_for_sample(self) -> None:
        self._story.add("shares_prompt", "waits for the first sample of its prompt")
        if not self.admitted:
            request, siblings = self._request, self._siblings
            priority = request.engine.priority
            self._router.admission_queue.follow(
                self.request_id, priority=priority, tenant=request.tenant, siblings=siblings
            )

    def _enter_queue(self, wanted: f.Place, answer: Answer, decision: Decision) -> bool:
        """Whether a new request may go at once; if not, it was refused or waits in the admission queue."""
        request = self._request
        try:
            entry = self._router.admission_queue.enter(
                self.request_id,
                decision,
                prompt_tokens=wanted.num_tokens,
                max_tokens=request.engine.sampling.max_tokens,
                admit=lambda: self._on_admitted(wanted, answer),
                refuse=lambda error: answer(f.Unplaceable(error)),
                priority=request.engine.priority,
                tenant=request.tenant,
                siblings=self._siblings,
                adapter=request.engine.adapter,
            )
        except Overloaded as error:
            self._story.add("refused", error.message, decision)
            answer(f.Unplaceable(error))
            return False
        if entry is None:
            self.admitted = self._siblings.admitted = True
            return True
        self._story.add("queued", entry.reason, {"ahead": entry.ahead, "ahead_s": round(entry.ahead_s, 3)})
        return False

    def _on_admitted(self, wanted: f.Place, answer: Answer) -> None:
        self.admitted = self._siblings.admitted = True
        self._node_deadline_s = None  # nodes were found when it was queued
        self._place_again(wanted, answer)

    def _on_no_node(self, wanted: f.Place, answer: Answer, error: Unavailable) -> None:
        nodes, fleets = self._router.nodes, self._router.fleets
        if fleets.finishing.nodes and not fleets.by_role["decode"].nodes:
            error = Unavailable("every decode node that is left is draining; try again later")
        else:
            error.__traceback__ = None  # its frames refer to the request, which would wait for the garbage collector
        if wanted.attempt == 1 and not (self.admitted or self._siblings.admitted or nodes.rejoining):
            answer(f.Unplaceable(error))
        else:
            self._wait_for_node(wanted, answer, error)

    def _wait_for_node(self, wanted: f.Place, answer: Answer, error: Unavailable) -> None:
        """Wait until a node returns. A wake-up after which there is no node again does not prolong the wait."""
        now_s = self._router.clock()
        if self._node_deadline_s is None:
            self._node_deadline_s = now_s + REPLACEMENT_WAIT_S
        elif now_s >= self._node_deadline_s:
            answer(f.Unplaceable(error))
            return
        self._story.add("parked", error.message)
        self._router.retry_wait.until_node(
            self.request_id,
            self._node_deadline_s - now_s,
            wake=lambda: self._place_again(wanted, answer),
            give_up=lambda: answer(f.Unplaceable(error)),
        )

    def _back_off(self, wanted: f.Place, answer: Answer, why: str) -> None:
        self._story.add("backoff", why, {"seconds": round(wanted.backoff_s, 3)})
        rested = wanted._replace(backoff_s=0.0)
        self._router.retry_wait.pause(self.request_id, wanted.backoff_s, lambda: self._place_again(rested, answer))

    def _place_again(self, wanted: f.Place, answer: Answer) -> None:
        """`place` after a wait. A bug ends only this request; the exception does not reach the code that ended the wait."""
        try:
            self.place(wanted, answer)
        except Exception:
            log.exception("%s could not be placed", AttemptKey(self.request_id, wanted.attempt))
            answer(f.GiveUp(KvRelayError("internal error in the router")))

    # -- the current attempt

    def send(self, incarnation: str, message: PrefillRequest | DecodeRequest | Abort) -> None:
        """Send to a node of an attempt, as `NodeTable.send`. Raises: Unavailable."""
        if isinstance(message, Abort) or self._placement is None:
            self._router.nodes.send(incarnation, message)
            return
        tokens, blocks, work_s = self._placement.leg(incarnation)
        self._router.nodes.send(incarnation, message, tokens=tokens, blocks=blocks, work_s=work_s)

    def reported(self, incarnation: str) -> None:
        """A leg reported its first tokens: this node has the blocks that were expected there."""
        self._unproven.discard(incarnation)
