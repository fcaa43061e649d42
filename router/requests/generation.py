"""One generation: owns everything about a request from its acceptance to its end.

It holds the request's state machine (`Flow`), its text and its story. Runs on the router's event loop. The HTTP side reads
deltas and the outcome; the dispatcher feeds events.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from common.base.errors import Unavailable
from common.control.identities import pack_ids
from common.control.messages import FinishReason, PromptLogprobs
from router.metrics import Finished
from router.policy import Decision, Query
from router.requests import flow_events as f
from router.requests.flow import Flow
from router.requests.placement import HashChain, Placement
from router.requests.queued_request import Siblings
from router.requests.request import Delta, GenerationRequest, Outcome, Served
from router.requests.router_state import RouterState
from router.requests.running_request import RunningRequest
from router.requests.story import Story
from router.text.detokenizer import Detokenizer, TokenPieces
from router.text.stop_strings import NoText, TextStream

log = logging.getLogger(__name__)


def text_of(request: GenerationRequest, pieces: TokenPieces) -> TextStream | NoText:
    """The text of a generation's tokens, up to a stop string."""
    if not request.detokenize:
        return NoText()
    detokenizer = Detokenizer(
        pieces,
        skip_special_tokens=request.skip_special_tokens,
        visible=request.visible_tokens,
        prompt_ids=request.engine.prompt_ids,
    )
    sampling = request.engine.sampling
    return TextStream(detokenizer, request.stop, min_tokens=sampling.min_tokens, include_stop=request.include_stop)


class Generation(RunningRequest[Flow]):
    """The answer to one prompt.

    `on_news()` is called whenever there are new deltas or the outcome. Invariant: `outcome` is set exactly once, and no
    delta follows.
    """

    _OUTCOME = Outcome
    outcome: Outcome | None

    def __init__(
        self,
        request_id: str,
        request: GenerationRequest,
        pieces: TokenPieces,
        router: RouterState,
        *,
        max_attempts: int,
        deadline_s: float,
        on_news: Callable[[], None],
        siblings: Siblings,
        client_id: str = "",
    ) -> None:
        engine, story = request.engine, Story(request_id, client_id)
        story.trace = request.trace
        story.add("arrived", data={"prompt_tokens": len(engine.prompt_ids), "max_tokens": engine.sampling.max_tokens})
        if router.stories.watched:
            engine, story.token_times = engine._replace(timeline=True), array("f")
        flow = Flow(request_id, engine, max_attempts, siblings)
        super().__init__(request_id, flow, router, story, request.tenant, engine.priority, deadline_s)
        self.request = request
        self.decision: Decision | None = None
        """The decision of the latest attempt."""
        self.served = Served()
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._on_news = on_news
        self._arrived_s = time.perf_counter()
        self._first_token_s = self._last_token_s = self._prefill_s = 0.0
        self._cached_known = False
        self._expected_hit: int | None = None
        """Prompt tokens whose KV the first attempt's node was expected to have."""
        self._text = text_of(request, pieces)
        self._stop: str | None = None
        self._ended_by_token = False
        self._deltas: list[Delta] = []
        self._chain = HashChain(engine.cache_salt, engine.lora_id)
        self._chosen: Placement | None = None
        """The latest choice of nodes."""
        self._placement: Placement | None = None
        """The latest choice that got an attempt."""
        self._kv_kind = ""
        """KV kind of the node that generates, or generated, the first token."""
        self._unproven: set[str] = set()
        """Incarnations that got the prompt but have not reported yet: the blocks expected there may be missing."""

    # -- for the HTTP side

    @property
    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """One for each prompt token after the first, if the request asked for them; complete before the first delta."""
        shared = self.request.shared
        return self._prompt_logprobs if shared is None else shared.prompt_logprobs

    @property
    def ttft_s(self) -> float:
        """Seconds from the arrival to the first token; 0 while there is none."""
        return max(0.0, self._first_token_s - self._arrived_s)

    def take(self) -> list[Delta]:
        """The deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _notify(self) -> None:
        self._on_news()

    # -- nodes

    def prepare(self, choose: f.Choose) -> f.Answer:
        """Choose nodes, or wait for the first sample of the prompt, for a node, or in the admission queue."""
        engine, token_ids = self.request.engine, self.flow.token_ids
        query = self._query(choose)
        # A sample that has generated more than its prompt has more to compute than to share.
        shared = None if len(token_ids) > len(engine.prompt_ids) else self.request.shared
        if shared is not None:
            fleet = self._router.fleets.decode(begun=query.begun)
            usable = shared.holder not in query.avoid and fleet.row(shared.holder) is not None
            if not shared.may_place(self.request_id, holder_usable=usable, wake=self.on_ready):
                return self._await_sample(choose)
            query.holder = shared.holder
        names = partial(self._chain.hashes, token_ids=engine.prompt_ids + pack_ids(token_ids))
        try:
            self._chosen = self._router.placer.decide(query, names, self._unproven)
        except Unavailable as error:
            fleets = self._router.fleets
            draining = fleets.finishing.nodes and not fleets.by_role["decode"].nodes
            why = Unavailable("every decode node that is left is draining; try again later") if draining else error
            return self._no_node(why)
        decision = self._chosen.decision
        if choose.is_new:
            request = self._queued(query.num_tokens, engine.sampling.max_tokens, engine.adapter)
            waits = self._enter_queue(decision, request)
            if waits is not None:
                return waits
        nodes = self._router.nodes
        decode = nodes.get(decision.decode.incarnation)
        prefill = None if decision.prefill is None else nodes.get(decision.prefill.incarnation)
        assert decode is not None
        return f.Found(None if prefill is None else prefill.record.peer, decode.record.peer, self._timeout_s())

    def _query(self, choose: f.Choose) -> Query:
        """The request to place. The placer writes the prefix hits into it."""
        engine, num_generated = self.request.engine, len(self.flow.token_ids)
        return Query(
            len(engine.prompt_ids) + num_generated,
            avoid=choose.avoid | self._router.breakers.not_admitted(),
            last=choose.last,
            max_new_tokens=engine.sampling.max_tokens - num_generated,
            open_ended=self.request.open_ended,
            session=self.request.session,
            kv_kind=self._kv_kind if num_generated else "",
            begun=choose.begun,
            adapter=engine.adapter,
        )

    def _await_sample(self, choose: f.Choose) -> f.SampleAwaited:
        self.story.add("shares_prompt", "waits for the first sample of its prompt")
        if choose.is_new:
            self._router.admission_queue.follow(self._queued())
        return f.SampleAwaited()

    def admit(self) -> None:
        """Count the attempt at the chosen nodes."""
        placement = self._placement = self._chosen
        assert placement is not None
        router, served, decision = self._router, self.served, placement.decision
        self.decision = decision
        incarnations = [leg.incarnation for leg in (decision.prefill, decision.decode) if leg is not None]
        for incarnation in incarnations:
            router.breakers.chosen(incarnation)
        self._unproven.update(incarnations)
        router.placer.expect(placement, incarnations)
        if not self.flow.token_ids:
            decode = router.nodes.get(incarnations[-1])
            self._kv_kind = "" if decode is None else decode.kv_kind
        served.prefill_hit_tokens = served.decode_hit_tokens = None
        if self._expected_hit is None:
            self._expected_hit = (decision.prefill or decision.decode).hit_tokens
        router.metrics.attempt(decision.mode, self.flow.attempt)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s goes to %s", self.flow.key, decision.explain())
        self.story.add("decision", f"attempt {self.flow.attempt}", decision)

    def _leg(self, incarnation: str) -> tuple[float, int, float]:
        assert self._placement is not None
        return self._placement.leg(incarnation)

    # -- what nodes answer

    def _emit(self, emit: f.Emit) -> None:
        if self._stop is not None or self.request.prompt_only:
            return
        delta = self._text.push(emit.token_ids, ended_by_token=emit.ended_by_token)
        first = self.completion_tokens == 0
        self.completion_tokens += delta.consumed
        self._ended_by_token = emit.ended_by_token
        logprobs = emit.logprobs
        if delta.consumed < len(emit.token_ids):
            logprobs = None if logprobs is None else logprobs[: delta.consumed]
        self._deltas.append(Delta(delta.text, emit.token_ids[: delta.consumed], logprobs))
        self._count_tokens(delta.consumed, first=first)
        if delta.stop is not None:
            self._stop = delta.stop
            self.story.add("stop_found", repr(delta.stop))
            self._events.append(f.StopFound())
        self._on_news()

    def _take_prompt_logprobs(self, emit: f.EmitPrompt) -> None:
        self._prompt_logprobs = emit.logprobs
        if self.request.shared is not None:
            self.request.shared.prompt_logprobs = emit.logprobs

    def _count_tokens(self, count: int, *, first: bool) -> None:
        now_s, metrics = time.perf_counter(), self._router.metrics
        if first:
            self._first_token_s = now_s
            self._router.unanswered.discard(self.request_id)
            metrics.first_tokens(count, now_s - self._arrived_s)
        else:
            metrics.more_tokens(count, now_s - self._last_token_s)
        self._last_token_s = now_s
        if self.story.token_times is not None:
            self.story.tokens()

    def _take_report(self, report: f.Report) -> None:
        stats = report.stats
        self._prefill_s = stats.prefill_s or self._prefill_s
        # Later attempts hit blocks that the first one left in the caches, so the client is told the first one's hits. If
        # the first attempt ended without a report, these are the hits that its placement expected.
        if not self._cached_known and (report.role == "prefill" or self.flow.prefill_peer is None):
            hits = stats.cached_tokens if self.flow.attempt == 1 else self._expected_hit or 0
            self.cached_tokens = min(hits, len(self.request.engine.prompt_ids))
            self._cached_known = True
        if report.role == "prefill":
            self.served.prefill_hit_tokens = stats.cached_tokens
        else:  # both legs may count the bytes of one relay; the receiver's count is used
            self.served.decode_hit_tokens = stats.cached_tokens
            self.served.relayed_bytes += stats.relayed_bytes
            if self.flow.prefill_peer is not None:
                source = self.flow.prefill_peer.incarnation
                self._router.nodes.relayed(report.incarnation, source, stats.relayed_bytes)
            if self.request.shared is not None:
                self.request.shared.held_at(report.incarnation)
        router = self._router
        if stats.timeline:
            about = {"attempt": self.flow.attempt, "incarnation": report.incarnation, "role": report.role}
            self.story.add("timeline", "", {**about, "marks": stats.timeline})
        router.breakers.succeeded(report.incarnation)
        router.metrics.leg(report.role, stats)
        self._unproven.discard(report.incarnation)
        router.placer.reported(report.role, report.incarnation, stats)

    def _finished(self, reason: FinishReason) -> Outcome:
        if self._stop is not None:
            return Outcome("stop", self._stop)
        if self.request.prompt_only:
            return Outcome("length")
        rest = self._text.flush()
        if rest:
            self._deltas.append(Delta(rest, [], None))
        last = self.flow.token_ids[-1] if self.flow.token_ids else None
        if self._ended_by_token and last in self.request.client_stop_ids:
            return Outcome(reason, last)
        return Outcome(reason)

    def _record_end(self, outcome: Outcome) -> None:
        engine, metrics = self.request.engine, self._router.metrics
        if self.request.shared is not None:
            self.request.shared.leave(self.request_id, ends_request=outcome.finish_reason is None)
        if outcome.finish_reason is not None:
            self._router.placer.answered(len(self.flow.token_ids))
        data = {
            "prompt_tokens": len(engine.prompt_ids),
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "relayed_bytes": self.served.relayed_bytes,
        }
        if outcome.error is not None:
            self.story.add("failed", f"{outcome.error.code}: {outcome.error.message}", data)
            metrics.failed(outcome.error.code)
        elif outcome.finish_reason is None:
            self.story.add("cancelled", "the client disconnected", data)
            metrics.cancelled()
        else:
            self.story.add("finished", outcome.finish_reason, data)
            numbers = Finished(
                len(engine.prompt_ids),
                time.perf_counter() - self._arrived_s,
                self.completion_tokens,
                engine.sampling.max_tokens,
                self._last_token_s - self._first_token_s,
                self._prefill_s,
                self.flow.preemptions,
            )
            metrics.finished(outcome.finish_reason, numbers)

    _EXECUTE: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        **RunningRequest._EXECUTE,
        f.Emit: _emit,
        f.EmitPrompt: _take_prompt_logprobs,
        f.Report: _take_report,
        f.Finish: lambda self, finish: self._end(self._finished(finish.reason)),
    }
