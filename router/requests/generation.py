"""One generation: owns everything about a request from its acceptance to its end.

Its parts are the state machine (`Flow`), the placing of its attempts (`Attempts`), its deadline, its text and its story.
Runs on the router's event loop. The HTTP side reads deltas and the outcome; the dispatcher feeds events.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from common.base.errors import KvRelayError, Unavailable
from common.control.identities import AttemptKey
from common.control.messages import Abort, FinishReason, PromptLogprobs
from router.metrics import Finished
from router.policy import Decision
from router.requests import flow_events as f
from router.requests.attempt_placing import Attempts
from router.requests.flow import Flow
from router.requests.queued_request import Siblings
from router.requests.request import Delta, GenerationRequest, Outcome, Served
from router.requests.router_state import RouterState
from router.requests.story import Story
from router.text.detokenizer import TokenPieces
from router.text.stop_strings import NoText, TextStream

log = logging.getLogger(__name__)


def _text_of(request: GenerationRequest, pieces: TokenPieces) -> TextStream | NoText:
    if not request.detokenize:
        return NoText()
    return TextStream(
        pieces,
        request.stop,
        min_tokens=request.engine.sampling.min_tokens,
        skip_special_tokens=request.skip_special_tokens,
        include_stop=request.include_stop,
        visible=request.visible_tokens,
        prompt_ids=request.engine.prompt_ids,
    )


class Generation:
    """The answer to one prompt. Call `enter`, then `start`.

    `on_news()` is called whenever there are new deltas or the outcome. Invariants: `outcome` is set exactly once, and no
    delta follows; from then on the request is in no table of the router.
    """

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
        self.request_id = request_id
        self.request = request
        engine, self.story = request.engine, Story(request_id, client_id)
        self.story.trace = request.trace
        sizes = {"prompt_tokens": len(engine.prompt_ids), "max_tokens": engine.sampling.max_tokens}
        self.story.add("arrived", data=sizes)
        if router.stories.watched:
            engine, self.story.token_times = engine._replace(timeline=True), array("f")
        self.flow = Flow(request_id, engine, max_attempts)
        self.attempts = Attempts(
            request_id,
            request,
            self.flow.token_ids,
            router,
            deadline_s=deadline_s,
            story=self.story,
            siblings=siblings,
        )
        self.served = Served()
        self.outcome: Outcome | None = None
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._router = router
        self._on_news = on_news
        self._arrived_s = time.perf_counter()
        self._first_token_s = self._last_token_s = 0.0
        self._cached_known = False
        self._expected_hit: int | None = None
        """Prompt tokens whose KV the first attempt's node was expected to have."""
        self._text = _text_of(request, pieces)
        self._stop: str | None = None
        self._ended_by_token = False
        self._deltas: list[Delta] = []
        self._events: deque[f.Event] = deque()
        self._busy = False

    # -- for the HTTP side

    @property
    def decision(self) -> Decision | None:
        """The decision of the latest attempt."""
        return self.attempts.decision

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

    def cancel(self) -> None:
        """The client disconnected: abort both legs. Nothing happens if the generation has ended."""
        if self.outcome is None:
            self.feed(f.ClientGone())

    # -- for the dispatcher

    def enter(self) -> None:
        """Enter the router's tables; `_end` takes the request out of all of them."""
        self._router.enter(self.request_id, self, self.story)

    def start(self) -> None:
        """Place the first attempt; call once. Like `feed`, it never raises."""
        if self.outcome is None:
            self._run(self.flow.start())

    def feed(self, event: f.Event) -> None:
        """Handle one event.

        An event that arises during the handling of another one waits until all instructions of the first are carried out:
        otherwise an abort could overtake the request it aborts. Never raises: a bug ends this request and does not reach
        the caller.
        """
        self._events.append(event)
        if not self._busy:
            self._run([])

    def _run(self, instructions: f.Instructions) -> None:
        self._busy = True
        pending = deque(instructions)
        try:
            while pending or self._events:
                if pending:
                    instruction = pending.popleft()
                    self._HOW[type(instruction)](self, instruction)
                else:
                    event = self._events.popleft()
                    if type(event) is f.Placed:
                        self._placed(event)
                    pending += self.flow.handle(event)
        except Exception:
            log.exception("%s failed because of a bug", self._key)
            try:
                self._break_off(pending)
            except Exception:
                log.exception("%s could not be ended cleanly", self._key)
        finally:
            self._busy = False

    @property
    def _key(self) -> AttemptKey:
        """The present attempt, for the log."""
        return AttemptKey(self.request_id, self.flow.attempt)

    def _placed(self, event: f.Placed) -> None:
        served, decision = self.served, self.attempts.decision
        served.prefill_hit_tokens = served.decode_hit_tokens = None
        if self._expected_hit is None and decision is not None:
            self._expected_hit = (decision.prefill or decision.decode).picked.hit_tokens
        self.story.add("decision", f"attempt {self.flow.attempt}", decision)

    def _break_off(self, pending: Iterable[f.Instruction]) -> None:
        """End at once after a bug, even if the flow has ended already: close the legs, tell the client."""
        self._events.clear()
        error = KvRelayError("internal error in the router")
        for instruction in [*pending, *self.flow.handle(f.GiveUp(error))]:
            if isinstance(instruction, f.Release) or (
                isinstance(instruction, f.Send) and isinstance(instruction.message, Abort)
            ):
                try:
                    self._HOW[type(instruction)](self, instruction)
                except Exception:
                    log.exception("%s: closing a leg failed", self._key)
        self._events.clear()
        if self.outcome is None:
            self._end(Outcome(error=error))
        else:
            self._on_news()

    def _send(self, send: f.Send) -> None:
        peer, message = send
        try:
            self.attempts.send(peer.incarnation, message)
            if not isinstance(message, Abort):
                self.story.add("sent", type(message).__name__, {"node": peer.node_id})
        except Unavailable as error:
            self._events.append(f.NodeLost(peer.incarnation, error.message))

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
            self._router.table.first_token(self.request_id)
            metrics.first_tokens(count, now_s - self._arrived_s)
        else:
            metrics.more_tokens(count, now_s - self._last_token_s)
        self._last_token_s = now_s
        if self.story.token_times is not None:
            self.story.tokens()

    def _take_report(self, report: f.Report) -> None:
        stats = report.stats
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
        self.attempts.reported(report.incarnation)
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

    def _end(self, outcome: Outcome) -> None:
        """End the request and remove it from all tables. A second call does nothing: a stop string in the chunk that
        ends the attempt has already decided the outcome.
        """
        if self.outcome is not None:
            return
        self.outcome = outcome
        router = self._router
        router.leave(self.request_id)
        self._record_end(outcome)
        if self.request.shared is not None:
            self.request.shared.leave(self.request_id, ends_request=outcome.finish_reason is None)
        if outcome.finish_reason is not None:
            router.placer.answered(len(self.flow.token_ids))
        router.stories.end(self.story)
        self._on_news()

    def _release(self, leg: f.Release) -> None:
        self._router.nodes.release(leg.incarnation, leg.key)
        self._router.admission_queue.release_soon()

    def _record_end(self, outcome: Outcome) -> None:
        """Add the end to the story and to the metrics."""
        engine, metrics = self.request.engine, self._router.metrics
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
            )
            metrics.finished(outcome.finish_reason, numbers)

    _HOW: ClassVar[dict[type, Callable[[Generation, Any], None]]] = {
        f.Place: lambda self, place: self.attempts.place(place, self.feed),
        f.Send: _send,
        f.Release: _release,
        f.Emit: _emit,
        f.EmitPrompt: _take_prompt_logprobs,
        f.Report: _take_report,
        f.Blame: lambda self, blame: self._router.breakers.failed(blame.incarnation, blame.error),
        f.Note: lambda self, note: self.story.add(*note),
        f.Finish: lambda self, finish: self._end(self._finished(finish.reason)),
        f.Fail: lambda self, fail: self._end(Outcome(error=fail.error)),
        f.Cancelled: lambda self, _: self._end(Outcome()),
    }
    """Carries out each kind of instruction."""
