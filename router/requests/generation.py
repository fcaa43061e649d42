"""One generation: the flow's shell. It carries the flow's instructions out and turns tokens into text.

Runs on the router's event loop. The HTTP side reads deltas and the outcome; the dispatcher feeds events.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from common.base.errors import KvRelayError, Unavailable
from common.control.messages import (
    Abort,
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    FinishReason,
    PrefillRequest,
    TokenLogprobs,
)
from router.policy import Decision
from router.requests import flow_events as f
from router.requests.flow import Flow
from router.requests.story import Story
from router.text.detokenizer import TokenPieces
from router.text.stop_strings import TextStream

log = logging.getLogger(__name__)


class GenerationRequest(NamedTuple):
    """All that one generation needs, validated and bounded."""

    engine: EngineRequest
    stop: tuple[str, ...] = ()
    client_stop_ids: frozenset[int] = frozenset()
    """Stop tokens that the client named itself: the ones that `stop_reason` reports."""
    skip_special_tokens: bool = True
    session: str = ""
    """Requests with the same key go to the same nodes under the policy `session`."""
    tenant: str = ""
    """Whose share of the cluster it takes while requests wait."""


@dataclass(slots=True)
class Delta:
    """What some tokens brought. `text` can lag behind `token_ids`: half characters and possible stop strings wait."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


class Outcome(NamedTuple):
    """How a generation ended: with a finish reason, with an error, or (neither) because the client left."""

    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: KvRelayError | None = None


@dataclass(slots=True)
class Served:
    """How the present attempt was served, as far as its legs have reported; bytes are of all attempts."""

    prefill_hit_tokens: int | None = None
    decode_hit_tokens: int | None = None
    relayed_bytes: int = 0


class Shell(Protocol):
    """What a generation needs from the dispatcher."""

    def place(self, generation: Generation, wanted: f.Place) -> None:
        """Answer with `feed(Placed)` or `feed(Unplaceable)`, now or later."""
        ...

    def send(self, incarnation: str, message: PrefillRequest | DecodeRequest | Abort) -> None:
        """Raises: Unavailable."""
        ...

    def release(self, incarnation: str, key: AttemptKey) -> None: ...

    def on_tokens(self, generation: Generation, count: int, *, first: bool) -> None: ...

    def on_report(self, generation: Generation, report: f.Report) -> None: ...

    def blame(self, incarnation: str, error: KvRelayError) -> None: ...

    def on_end(self, generation: Generation) -> None: ...


class Generation:
    """One prompt's answer in the making.

    `on_news()` is called whenever `take` or `outcome` has something new. Invariant: `outcome` is set exactly
    once; no delta comes after it.
    """

    def __init__(
        self,
        request_id: str,
        request: GenerationRequest,
        pieces: TokenPieces,
        shell: Shell,
        *,
        max_attempts: int,
        on_news: Callable[[], None],
        story: Story | None = None,
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.flow = Flow(request_id, request.engine, max_attempts)
        self.decision: Decision | None = None
        """Of the latest attempt."""
        self.served = Served()
        self.story = story or Story(request_id)
        self.outcome: Outcome | None = None
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.arrived_s = time.perf_counter()
        self.last_token_s: float | None = None
        self._cached_known = False
        self._expected_hit: int | None = None
        """Prompt tokens that the first attempt's node held, as far as its placing knew."""
        self._shell = shell
        self._on_news = on_news
        self._text = TextStream(
            pieces,
            request.stop,
            min_tokens=request.engine.sampling.min_tokens,
            skip_special_tokens=request.skip_special_tokens,
        )
        self._stop: str | None = None
        self._ended_by_token = False
        self._deltas: list[Delta] = []
        self._events: deque[f.Event] = deque()
        self._busy = False

    # -- for the HTTP side

    def take(self) -> list[Delta]:
        """The deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def cancel(self) -> None:
        """The client left: abort both legs. Nothing happens if the generation has ended."""
        if self.outcome is None:
            self.feed(f.ClientGone())

    # -- for the dispatcher

    def start(self) -> None:
        """Begin; call once. Raises nothing, as `feed`."""
        if self.outcome is None:
            self._run(self.flow.start())

    def feed(self, event: f.Event) -> None:
        """Handle one event.

        Events that come up while another one is carried out wait until all of its instructions are done:
        otherwise an abort could overtake the request it aborts. Raises nothing: a bug that one request hits
        ends that one, not whoever brought the event.
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
                    self._carry_out(pending.popleft())
                else:
                    event = self._events.popleft()
                    if type(event) is f.Placed:
                        self._placed(event)
                    pending += self.flow.handle(event)
        except Exception:
            log.exception("%s failed", self.request_id)
            try:
                self._break_off(pending)
            except Exception:
                log.exception("%s could not be ended in order", self.request_id)
        finally:
            self._busy = False

    def _placed(self, event: f.Placed) -> None:
        served, flow = self.served, self.flow
        served.prefill_hit_tokens = served.decode_hit_tokens = None
        if self._expected_hit is None and self.decision is not None:
            self._expected_hit = (self.decision.prefill or self.decision.decode).picked.hit_tokens
        self.story.add("decision", f"attempt {flow.attempt}", self.decision)

    def _break_off(self, pending: Iterable[f.Instruction]) -> None:
        """End at once, although the flow may think that it ended well already: legs closed, the client told."""
        self._events.clear()
        error = KvRelayError("internal error in the router")
        for instruction in [*pending, *self.flow.handle(f.GiveUp(error))]:
            if isinstance(instruction, f.Release) or (
                isinstance(instruction, f.Send) and isinstance(instruction.message, Abort)
            ):
                try:
                    self._carry_out(instruction)
                except Exception:
                    log.exception("%s: closing a leg failed", self.request_id)
        self._events.clear()
        if self.outcome is None:
            self._end(Outcome(error=error))
        else:
            self._on_news()

    def _carry_out(self, instruction: f.Instruction) -> None:
        self._HOW[type(instruction)](self, instruction)

    def _send(self, send: f.Send) -> None:
        peer, message = send
        try:
            self._shell.send(peer.incarnation, message)
            if not isinstance(message, Abort):
                self.story.add("sent", type(message).__name__, {"node": peer.node_id})
        except Unavailable as error:
            self._events.append(f.NodeLost(peer.incarnation, error.message))

    def _emit(self, emit: f.Emit) -> None:
        if self._stop is not None:
            return
        delta = self._text.push(emit.token_ids, ended_by_token=emit.ended_by_token)
        first = self.completion_tokens == 0
        self.completion_tokens += delta.consumed
        self._ended_by_token = emit.ended_by_token
        logprobs = emit.logprobs
        if delta.consumed < len(emit.token_ids):
            logprobs = None if logprobs is None else logprobs[: delta.consumed]
        self._deltas.append(Delta(delta.text, emit.token_ids[: delta.consumed], logprobs))
        self._shell.on_tokens(self, delta.consumed, first=first)
        if delta.stop is not None:
            self._stop = delta.stop
            self.story.add("stop_found", repr(delta.stop))
            self._events.append(f.StopFound())
        self._on_news()

    def _take_report(self, report: f.Report) -> None:
        stats = report.stats
        # Later attempts find what the first one left in the caches; the client is told of the first one's hits. Where
        # that one ended before it could report them, what is known is what it was placed by.
        if not self._cached_known and (report.role_is_prefill or self.flow.prefill_peer is None):
            hits = stats.cached_tokens if self.flow.attempt == 1 else self._expected_hit or 0
            self.cached_tokens = min(hits, len(self.request.engine.prompt_ids))
            self._cached_known = True
        if report.role_is_prefill:
            self.served.prefill_hit_tokens = stats.cached_tokens
        else:  # both legs may count the bytes of one relay; the receiver knows what arrived
            self.served.decode_hit_tokens = stats.cached_tokens
            self.served.relayed_bytes += stats.relayed_bytes
        self._shell.on_report(self, report)

    def _finished(self, reason: FinishReason) -> Outcome:
        if self._stop is not None:
            return Outcome("stop", self._stop)
        rest = self._text.flush()
        if rest:
            self._deltas.append(Delta(rest, [], None))
        last = self.flow.token_ids[-1] if self.flow.token_ids else None
        if self._ended_by_token and last in self.request.client_stop_ids:
            return Outcome(reason, last)
        return Outcome(reason)

    def _end(self, outcome: Outcome) -> None:
        # A stop string found in the very chunk that ends the attempt has already decided the outcome.
        if self.outcome is None:
            self.outcome = outcome
            self._tell_end(outcome)
            self._shell.on_end(self)
            self._on_news()

    def _tell_end(self, outcome: Outcome) -> None:
        data = {
            "prompt_tokens": len(self.request.engine.prompt_ids),
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "relayed_bytes": self.served.relayed_bytes,
        }
        if outcome.error is not None:
            self.story.add("failed", f"{outcome.error.code}: {outcome.error.message}", data)
        elif outcome.finish_reason is None:
            self.story.add("cancelled", "the client left", data)
        else:
            self.story.add("finished", outcome.finish_reason, data)

    _HOW: ClassVar[dict[type, Callable[[Generation, Any], None]]] = {
        f.Place: lambda self, place: self._shell.place(self, place),
        f.Send: _send,
        f.Release: lambda self, leg: self._shell.release(leg.incarnation, leg.key),
        f.Emit: _emit,
        f.Report: _take_report,
        f.Blame: lambda self, blame: self._shell.blame(blame.incarnation, blame.error),
        f.Note: lambda self, note: self.story.add(*note),
        f.Finish: lambda self, finish: self._end(self._finished(finish.reason)),
        f.Fail: lambda self, fail: self._end(Outcome(error=fail.error)),
        f.Cancelled: lambda self, _: self._end(Outcome()),
    }
    """How each kind of instruction is carried out."""
