"""The life of one generation as a state machine: what its nodes send becomes tokens. Pure: no I/O, no clock, no text.

              Found               prefill's token        decode's tokens        a finish_reason
    PLACING ---------> PREFILL ------------------> HANDOVER ----------> DECODE ----------------> DONE
       ^                  |  (local prefill: straight to DECODE)           |
       +------------------+------------------------------------------------+
              a leg failed, its node is lost or its context is full: the next attempt, with the tokens so far

`PlacedRequest` has what comes before the nodes, and what follows failures. Every token has an index (`TokenChunk.start`):
known tokens are dropped, tokens that come too early wait for the other leg, and a gap that can no longer be filled leads to
a new attempt. An attempt whose decode node generated tokens does not count as a failure, so that a long stream survives any
number of faults.

Invariant: the tokens of all `Emit`s, joined, are those of one undisturbed attempt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar

from common.base.errors import EngineError, KvRelayError
from common.control.identities import pack_ids
from common.control.messages import (
    DecodeRequest,
    EngineRequest,
    FinishReason,
    PrefillRequest,
    PromptLogprobs,
    TokenChunk,
)
from router.requests.flow_events import Chunk, Emit, EmitPrompt, Finish, Instructions, NoNode, Report, Send
from router.requests.placed_request import Leg, PlacedRequest, Row, State
from router.requests.queued_request import Siblings


class Flow(PlacedRequest):
    """One generation."""

    def __init__(
        self,
        request_id: str,
        request: EngineRequest,
        max_attempts: int = 3,
        siblings: Siblings | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(request_id, max_attempts, siblings, jitter)
        self.request = request
        self.token_ids: list[int] = []
        """Tokens generated so far by all attempts; all were emitted."""
        self.drafted = self.accepted = 0
        """Draft tokens that decode nodes verified, and those that were right."""
        self._early: list[TokenChunk] = []
        """Chunks of the decode node that wait for the prefill node's token; without gaps."""
        self._prompt_logprobs: list[PromptLogprobs] = []
        """Those that the current attempt has sent, until all are there."""
        self._enough = 0
        """The current attempt does not count as a failure once there are more tokens than this."""
        scored = request.sampling.prompt_logprobs is not None
        self._num_to_score = len(request.prompt_ids) - 1 if scored else 0
        """Prompt tokens whose log-probabilities are wanted and not yet emitted."""
        self._outgrown = False
        """The last attempt's decode node had no room for another token in its context."""
        self.preemptions = 0
        """How often its sequences were preempted, as far as attempts have told at their end."""

    def _open(self, timeout_s: float) -> Instructions:
        self.state = State.PREFILL
        self._outgrown = False
        self._early.clear()
        self._prompt_logprobs.clear()
        source, target = self._prefill, self._decode
        assert target is not None
        self._enough = len(self.token_ids) + (source is not None)
        generated = pack_ids(self.token_ids)
        # The decode node first, so that it knows the attempt when the prefill node's offer arrives.
        ask = DecodeRequest(self.key, self.request, generated, self.prefill_peer, timeout_s)
        instructions: Instructions = [Send(target.peer, ask)]
        if source is not None:
            order = PrefillRequest(self.key, self.request, generated, target.peer, timeout_s)
            instructions.append(Send(source.peer, order))
        return instructions

    # -- tokens

    def _on_chunk(self, event: Chunk) -> Instructions:
        chunk, leg = event.chunk, self._leg(event.incarnation)
        if leg is None or chunk.key.attempt != self.attempt:
            return []
        if chunk.prompt_logprobs is not None:
            return self._on_prompt_logprobs(leg, chunk.start, chunk.prompt_logprobs)
        if leg is self._prefill:
            return self._on_first_token(leg, chunk)
        if chunk.start > len(self.token_ids) and self.state is State.PREFILL and self._prefill is not None:
            last = self._early[-1] if self._early else None
            expected = len(self.token_ids) + 1 if last is None else last.start + len(last.token_ids)
            if chunk.start > expected:
                return self._on_gap(leg, chunk)
            if chunk.start + len(chunk.token_ids) > expected or chunk.finish_reason is not None:
                self._early.append(chunk)
            return []
        return self._on_decoded(leg, chunk)

    def _on_first_token(self, leg: Leg, chunk: TokenChunk) -> Instructions:
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

    def _on_decoded(self, leg: Leg, chunk: TokenChunk) -> Instructions:
        if chunk.start > len(self.token_ids):
            return self._on_gap(leg, chunk)
        if self.state is State.DECODE:
            return self._accept(leg, chunk)
        instructions = self._close_leg(self._prefill)  # its token has arrived, or the decode node's tokens include it
        instructions.append(self._note(self._first_event if self.state is State.PREFILL else "handover", leg))
        self.state = State.DECODE
        return instructions + self._accept(leg, chunk)

    def _accept(self, leg: Leg, chunk: TokenChunk) -> Instructions:
        """Emit the new tokens of a chunk that leaves no gap; end the request if the chunk is the last."""
        if self._num_to_score:
            return self._on_lost_logprobs(leg)
        instructions: Instructions = []
        if chunk.stats is not None:
            instructions.append(Report(leg.role, chunk.stats, leg.peer.incarnation))
        self.drafted += chunk.drafted
        self.accepted += chunk.accepted
        known = len(self.token_ids) - chunk.start
        fresh = chunk.token_ids[known:]
        if fresh:
            logprobs = None if chunk.logprobs is None else chunk.logprobs[known:]
            ended = chunk.finish_reason == "stop" and fresh[-1] in self.request.sampling.stop_token_ids
            self.token_ids += fresh
            instructions.append(Emit(fresh, logprobs, ended))
        if chunk.finish_reason is not None:
            self.preemptions += chunk.preemptions
            instructions += [*self._close_leg(leg), *self._on_finished(leg, chunk.finish_reason)]
        return instructions

    def _on_finished(self, leg: Leg, reason: FinishReason) -> Instructions:
        """End the request, or move it to a larger node: one whose context is shorter than the model's ends answers early."""
        if reason != "length" or len(self.token_ids) >= self.request.sampling.max_tokens:
            return self._end(Finish(reason))
        self._outgrown = True
        return [self._note("outgrown", leg), *self._close_legs(), *self._next_attempt()]

    def _on_no_node(self, event: NoNode) -> Instructions:
        return self._end(Finish("length")) if self._outgrown else super()._on_no_node(event)

    def _on_prompt_logprobs(self, leg: Leg, start: int, part: list[PromptLogprobs]) -> Instructions:
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

    def _on_lost_logprobs(self, leg: Leg) -> Instructions:
        message = f"log-probabilities of the prompt from {leg.peer.node_id} were lost"
        return [self._note("gap", leg, message), *self._retry(EngineError(message), None)]

    def _on_gap(self, leg: Leg, chunk: TokenChunk) -> Instructions:
        message = f"{leg.peer.node_id} sent token {chunk.start} where {len(self.token_ids)} was expected"
        return [self._note("gap", leg, message), *self._retry(EngineError(message), None)]

    def _retry(self, error: KvRelayError, blamed: Leg | None, **noted: object) -> Instructions:
        if len(self.token_ids) >= self.request.sampling.max_tokens:  # only the finish was lost
            return self._end(Finish("length"))
        if len(self.token_ids) > self._enough:
            self._failures = 0
            self._avoid.clear()
        return super()._retry(error, blamed, tokens_so_far=len(self.token_ids), **noted)

    @property
    def _first_event(self) -> str:
        """Name of the story event for the current attempt's first token."""
        return "resumed" if self.token_ids else "first_token"

    _WITH_NODES: ClassVar[Row] = {**PlacedRequest._WITH_NODES, Chunk: _on_chunk}
    _TABLE: ClassVar[dict[State, Row]] = {
        **PlacedRequest._TABLE,
        State.PLACING: {**PlacedRequest._TABLE[State.PLACING], NoNode: _on_no_node},
        **dict.fromkeys((State.PREFILL, State.HANDOVER, State.DECODE), _WITH_NODES),
    }
