"""The life of one request as a state machine: events in, instructions out. Pure: no I/O, no clock, no text.

              Placed              prefill's token        decode's tokens        a finish_reason
    PLACING ---------> PREFILL ------------------> HANDOVER ----------> DECODE ----------------> DONE
       ^                  |  (local prefill: straight to DECODE)           |
       +------------------+------------------------------------------------+
              a leg failed or its node is lost: the next attempt, with the tokens so far

Two rules suffice. Attempt numbers only grow, and messages of older attempts are ignored. Every token has an index
(`TokenChunk.start`): known tokens are dropped, tokens that come too early wait for the other leg, and a gap that can no
longer be filled leads to a new attempt.

Invariants: the tokens of all `Emit`s, joined, are those of one undisturbed attempt; exactly one of `Finish`, `Fail`,
`Cancelled` is returned, and nothing after it; each `Send` that opens a leg is matched by exactly one `Release` of it.

Retries: an attempt whose decode node generated tokens does not count as a failure, so that a long stream survives any
number of faults. `max_attempts` consecutive failures end the request, as does its deadline. The first retry starts at
once if there is another node; each further one waits twice as long as the one before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from common.base.errors import EngineError, KvRelayError, PeerLost, TransferError, Unavailable, from_code
from common.control.ids import pack_ids
from common.control.messages import (
    Abort,
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    PeerRef,
    PrefillRequest,
    PromptLogprobs,
    Role,
    TokenChunk,
)
from router.requests.flow_events import (
    Blame,
    Cancelled,
    Chunk,
    ClientGone,
    Emit,
    EmitPrompt,
    Event,
    Fail,
    Finish,
    GiveUp,
    Instructions,
    LegFailed,
    NodeLost,
    Note,
    Place,
    Placed,
    Release,
    Report,
    Send,
    StopFound,
    Unplaceable,
)


class State(StrEnum):  # strings hash in C; a plain enum's hash is a Python call for each event
    PLACING = "placing"
    PREFILL = "prefill"
    """Both legs have their request; the attempt's first token is awaited."""
    HANDOVER = "handover"
    """The prefill node's token has arrived, but no token of the decode node."""
    DECODE = "decode"
    """Tokens come from the decode node; the prefill leg is over."""
    DONE = "done"


_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 2.0


def backoff_s(failures: int, jitter: float) -> float:
    """How long to wait after this many consecutive failures; `jitter` in [0, 1) shortens it by up to a half."""
    return min(_MAX_BACKOFF_S, _BACKOFF_S * 2.0 ** min(failures - 1, 10)) * (1 - jitter / 2)


_Row = dict[type, Callable[..., Instructions]]
"""How one state handles each kind of event."""


@dataclass
class _Leg:
    role: Role
    peer: PeerRef
    open: bool = True


@dataclass
class Flow:
    """One request. Call `start` once, then `handle` with every event; carry the instructions out in order."""

    request_id: str
    request: EngineRequest
    max_attempts: int = 3
    """Consecutive failures that end the request."""
    jitter: Callable[[], float] = random.random
    state: State = State.PLACING
    attempt: int = 0
    token_ids: list[int] = field(default_factory=lambda: [])
    """Tokens generated so far by all attempts; all were emitted."""
    _prefill: _Leg | None = None
    _decode: _Leg | None = None
    _early: list[TokenChunk] = field(default_factory=lambda: [])
    """Chunks of the decode node that wait for the prefill node's token; without gaps."""
    _prompt_logprobs: list[PromptLogprobs] = field(default_factory=lambda: [])
    """Those that the current attempt has sent, until all are there."""
    _avoid: set[str] = field(default_factory=lambda: set())
    """Incarnations that failed since tokens last came."""
    _failures: int = 0
    """Consecutive failed attempts."""
    _enough: int = 0
    """The current attempt does not count as a failure once there are more tokens than this."""

    def start(self) -> Instructions:
        """The first instructions."""
        return self._place()

    def handle(self, event: Event) -> Instructions:
        """The instructions for `event`; none if it does not matter in this state."""
        method = self._TABLE[self.state].get(type(event))
        return [] if method is None else method(self, event)

    def __post_init__(self) -> None:
        self.key = AttemptKey(self.request_id, self.attempt)
        """Key of the current attempt."""
        scored = self.request.sampling.prompt_logprobs is not None
        self._num_to_score = len(self.request.prompt_ids) - 1 if scored else 0
        """Prompt tokens whose log-probabilities are wanted and not yet emitted."""

    @property
    def prefill_peer(self) -> PeerRef | None:
        """The current attempt's prefill node; None before placement and with local prefill."""
        return None if self._prefill is None else self._prefill.peer

    # -- placing

    def _place(self) -> Instructions:
        self.state = State.PLACING
        self.attempt += 1
        self.key = AttemptKey(self.request_id, self.attempt)
        self._prefill = self._decode = None
        self._early.clear()
        self._prompt_logprobs.clear()
        num_tokens = len(self.request.prompt_ids) + len(self.token_ids)
        last = self._failures > 0 and self._failures + 1 >= self.max_attempts
        wait_s = backoff_s(self._failures, self.jitter()) if self._failures else 0.0
        return [Place(self.attempt, num_tokens, frozenset(self._avoid), last, wait_s, self._failures == 1)]

    def _on_placed(self, event: Placed) -> Instructions:
        self.state = State.PREFILL
        self._enough = len(self.token_ids) + (event.prefill is not None)
        self._decode = _Leg("decode", event.decode)
        generated, timeout_s = pack_ids(self.token_ids), event.timeout_s
        # The decode node first, so that it knows the attempt when the prefill node's offer arrives.
        ask = DecodeRequest(self.key, self.request, generated, event.prefill, timeout_s)
        instructions: Instructions = [Send(event.decode, ask)]
        if event.prefill is not None:
            self._prefill = _Leg("prefill", event.prefill)
            order = PrefillRequest(self.key, self.request, generated, event.decode, timeout_s)
            instructions.append(Send(event.prefill, order))
        return instructions

    def _on_unplaceable(self, event: Unplaceable) -> Instructions:
        return self._end(Fail(event.error))

    # -- tokens

    def _on_chunk(self, event: Chunk) -> Instructions:
        chunk, leg = event.chunk, self._leg(event.incarnation)
        if leg is None or chunk.key.attempt != self.attempt:
            return []
        if chunk.prompt_logprobs is not None:
            return self._on_prompt_logprobs(leg, chunk.start, chunk.prompt_logprobs)
        if leg is self._prefill:
            return self._on_first_token(leg, chunk)
        if chunk.start > len(self.token_ids) and self._first_token_awaited:
            last = self._early[-1] if self._early else None
            expected = len(self.token_ids) + 1 if last is None else last.start + len(last.token_ids)
            if chunk.start > expected:
                return self._on_gap(leg, chunk)
            if chunk.start + len(chunk.token_ids) > expected or chunk.finish_reason is not None:
                self._early.append(chunk)
            return []
        return self._on_decoded(leg, chunk)

    @property
    def _first_token_awaited(self) -> bool:
        return self.state is State.PREFILL and self._prefill is not None

    def _on_first_token(self, leg: _Leg, chunk: TokenChunk) -> Instructions:
        if chunk.start > len(self.token_ids):
            return self._on_gap(leg, chunk)
        instructions: Instructions = []
        if self.state is State.PREFILL:
            instructions.append(self._note(self._first_event, leg))
        instructions += self._accept(leg, chunk)
        if self.state is State.PREFILL:
            self.state = State.HANDOVER
            early, self._early = self._early, []
            for waiting in early:
                if self.state in (State.HANDOVER, State.DECODE) and self._decode is not None:
                    instructions += self._on_decoded(self._decode, waiting)
        return instructions

    def _on_decoded(self, leg: _Leg, chunk: TokenChunk) -> Instructions:
        if chunk.start > len(self.token_ids):
            return self._on_gap(leg, chunk)
        if self.state is State.DECODE:
            return self._accept(leg, chunk)
        instructions = self._close_leg(self._prefill)  # its token has arrived, or the decode node's tokens include it
        instructions.append(self._note(self._first_event if self.state is State.PREFILL else "handover", leg))
        self.state = State.DECODE
        return instructions + self._accept(leg, chunk)

    def _accept(self, leg: _Leg, chunk: TokenChunk) -> Instructions:
        """Emit the new tokens of a chunk that leaves no gap; end the request if the chunk is the last."""
        if self._num_to_score:
            return self._on_lost_logprobs(leg)
        instructions: Instructions = []
        if chunk.stats is not None:
            instructions.append(Report(leg.role, chunk.stats, leg.peer.incarnation))
        known = len(self.token_ids) - chunk.start
        fresh = chunk.token_ids[known:]
        if fresh:
            start = len(self.token_ids)
            logprobs = None if chunk.logprobs is None else chunk.logprobs[known:]
            ended = chunk.finish_reason == "stop" and fresh[-1] in self.request.sampling.stop_token_ids
            self.token_ids += fresh
            instructions.append(Emit(start, fresh, logprobs, ended))
        if chunk.finish_reason is not None:
            instructions += [*self._close_leg(leg), *self._end(Finish(chunk.finish_reason))]
        return instructions

    def _on_prompt_logprobs(self, leg: _Leg, start: int, part: list[PromptLogprobs]) -> Instructions:
        known = len(self._prompt_logprobs)
        if not self._num_to_score:
            return []
        if start > known:
            return self._on_lost_logprobs(leg)
        self._prompt_logprobs += part[known - start :]
        if len(self._prompt_logprobs) < self._num_to_score:
            return []
        whole, self._prompt_logprobs, self._num_to_score = self._prompt_logprobs, [], 0
        # Later attempts must not compute them again.
        self.request = self.request._replace(sampling=self.request.sampling._replace(prompt_logprobs=None))
        return [EmitPrompt(whole)]

    def _on_lost_logprobs(self, leg: _Leg) -> Instructions:
        message = f"log-probabilities of the prompt from {leg.peer.node_id} were lost"
        return [self._note("gap", leg, message), *self._retry(EngineError(message), None)]

    def _on_gap(self, leg: _Leg, chunk: TokenChunk) -> Instructions:
        message = f"{leg.peer.node_id} sent token {chunk.start} where {len(self.token_ids)} was expected"
        return [self._note("gap", leg, message), *self._retry(EngineError(message), None)]

    # -- failures

    def _on_leg_failed(self, event: LegFailed) -> Instructions:
        leg = self._leg(event.incarnation)
        if leg is None or event.failure.key.attempt != self.attempt:
            return []
        if leg is self._prefill and self.state is State.DECODE:
            return []
        error = from_code(event.failure.code, event.failure.message)
        blamed = self._blamed(leg, error)
        failed: Instructions = [
            *self._close_leg(leg),
            self._note("leg_failed", leg, f"{error.code}: {error.message}", blamed=blamed.peer.node_id),
            Blame(blamed.peer.incarnation, error),
        ]
        return failed + self._retry(error, blamed)

    def _blamed(self, reporter: _Leg, error: KvRelayError) -> _Leg:
        """The leg to blame. If the reporter lost its peer, that is the other leg. Any other failed transfer does not tell
        which end is at fault; the prefill node is blamed, because it can be replaced while the decode node is kept. Every
        other error is the reporter's own.
        """
        if self._prefill is None or self._decode is None or not isinstance(error, TransferError):
            return reporter
        if isinstance(error, PeerLost) and reporter is self._prefill:
            return self._decode
        return self._prefill

    def _on_node_lost(self, event: NodeLost) -> Instructions:
        leg = self._leg(event.incarnation)
        if leg is None or (leg is self._prefill and self.state is State.DECODE):
            return []
        error = Unavailable(f"node {leg.peer.node_id} was lost: {event.reason}")
        # The node may be alive behind a broken link: the abort waits for a new link.
        gone: Instructions = [*self._close_leg(leg), Send(leg.peer, Abort(self.key))]
        return [*gone, self._note("node_lost", leg, event.reason), *self._retry(error, leg)]

    def _retry(self, error: KvRelayError, blamed: _Leg | None) -> Instructions:
        if len(self.token_ids) > self._enough:
            self._failures = 0
            self._avoid.clear()
        self._failures += 1
        if blamed is not None:
            self._avoid.add(blamed.peer.incarnation)
        sampling = self.request.sampling
        if len(self.token_ids) >= sampling.max_tokens:  # only the finish was lost
            return self._end(Finish("length"))
        if not error.retryable:
            return self._end(Fail(error))
        if self._failures >= self.max_attempts:
            return self._end(Fail(error.after_attempts(self.attempt)))
        closed = self._close_legs()
        note = Note("retry", error.message, {"failures_in_a_row": self._failures, "tokens_so_far": len(self.token_ids)})
        return [*closed, note, *self._place()]

    def _note(self, event: str, leg: _Leg, reason: str = "", **data: object) -> Note:
        about = {"attempt": self.attempt, "node": leg.peer.node_id, "role": leg.role, **data}
        return Note(event, reason, about)

    @property
    def _first_event(self) -> str:
        """Name of the story event for the current attempt's first token."""
        return "resumed" if self.token_ids else "first_token"

    def _on_client_gone(self, _: ClientGone) -> Instructions:
        return self._end(Cancelled())

    def _on_give_up(self, event: GiveUp) -> Instructions:
        return self._end(Fail(event.error))

    def _on_stop_found(self, _: StopFound) -> Instructions:
        return self._end(Finish("stop"))

    # -- legs

    def _leg(self, incarnation: str) -> _Leg | None:
        """The open leg at this incarnation."""
        for leg in (self._prefill, self._decode):
            if leg is not None and leg.open and leg.peer.incarnation == incarnation:
                return leg
        return None

    def _close_leg(self, leg: _Leg | None) -> Instructions:
        if leg is None or not leg.open:
            return []
        leg.open = False
        return [Release(leg.peer.incarnation, self.key)]

    def _close_legs(self) -> Instructions:
        """Abort the open legs."""
        instructions: Instructions = []
        for leg in (self._prefill, self._decode):
            if leg is not None and leg.open:
                instructions += [Send(leg.peer, Abort(self.key)), *self._close_leg(leg)]
        return instructions

    def _end(self, last: Finish | Fail | Cancelled) -> Instructions:
        instructions = self._close_legs()
        self.state = State.DONE
        self._early.clear()
        return [*instructions, last]

    _PLACING: ClassVar[_Row] = {
        Placed: _on_placed,
        Unplaceable: _on_unplaceable,
        ClientGone: _on_client_gone,
        GiveUp: _on_give_up,
        StopFound: _on_stop_found,
    }
    _RUNNING: ClassVar[_Row] = {
        Chunk: _on_chunk,
        LegFailed: _on_leg_failed,
        NodeLost: _on_node_lost,
        ClientGone: _on_client_gone,
        GiveUp: _on_give_up,
        StopFound: _on_stop_found,
    }
    _TABLE: ClassVar[dict[State, _Row]] = {
        State.PLACING: _PLACING,
        State.PREFILL: _RUNNING,
        State.HANDOVER: _RUNNING,
        State.DECODE: _RUNNING,
        State.DONE: {},
    }
