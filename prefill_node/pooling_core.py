"""The core of a node of a pooling model: requests in, batches of inputs computed in order, vectors out. Engine thread.

Requests are stateless: nothing is kept when one has been answered, and there is no KV.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.base.clock import Clock
from common.base.errors import BadRequest, EngineError, KvRelayError, Overloaded, Unavailable
from common.base.sentences import counted
from common.control.links import Identity
from common.control.messages import Abort, AttemptFailed, AttemptKey, DecodeRequest, NodeLoad, PrefillRequest
from common.control.pooling import PoolInput, PoolRequest, PoolResult
from common.node.events import ClientLost, FromClient, SendBuffer, brief
from common.node.step_timer import StepTimer

log = logging.getLogger(__name__)


Compute = Callable[[Sequence[tuple[PoolRequest, PoolInput]]], list[bytes]]
"""Computes the vector of each input, with the request's number of dimensions and encoded for `PoolResult`."""


@dataclass(frozen=True)
class PoolLimits:
    """What a node accepts and computes at once."""

    vocab_size: int
    max_model_len: int
    step_tokens: int
    """Most tokens of one step, unless one input is longer."""
    max_accepted: int


@dataclass(eq=False)
class _Attempt:
    identity: Identity
    request: PoolRequest
    arrived_s: float
    vectors: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Finished inputs by index."""


class _Waiting(NamedTuple):
    attempt: _Attempt
    place: int
    """Index among the request's inputs."""


class PoolingNode:
    """All attempts of one node. Implements `common.node.server.ServedCore`."""

    def __init__(self, compute: Compute, limits: PoolLimits, send_buffer: SendBuffer, clock: Clock) -> None:
        self.load = NodeLoad()
        self._compute = compute
        self._limits = limits
        self._send_buffer = send_buffer
        self._clock = clock
        self._attempts: dict[AttemptKey, _Attempt] = {}
        self._waiting: deque[_Waiting] = deque()
        """Inputs that are not computed, in the order in which they came; those of ended attempts are skipped."""
        self._timer = StepTimer()
        self._steps = self._computed_tokens = 0
        self.rests_until_s = 0.0
        """A time in the past: this core never rests (`EngineCore`)."""

    def handle(self, event: Any) -> None:
        match event:
            case FromClient(identity, PoolRequest() as request):
                self._accept(identity, request)
            case FromClient(_, Abort(key)):
                self._attempts.pop(key, None)
            case FromClient(identity, PrefillRequest() | DecodeRequest() as request):
                error = BadRequest("this node's model does not generate")
                self._send_buffer.reply(identity, AttemptFailed(request.key, error.code, error.message))
            case ClientLost(identity):
                # The router may only have been slow: then it must learn that its attempts are over.
                lost = Unavailable("the router was silent past its lease")
                for attempt in [each for each in self._attempts.values() if each.identity == identity]:
                    self._end(attempt, AttemptFailed(attempt.request.key, lost.code, lost.message))
            case _:
                log.warning("ignored an unexpected event: %s", brief(event))

    def _accept(self, identity: Identity, request: PoolRequest) -> None:
        limits = self._limits
        try:
            if len(self._attempts) >= limits.max_accepted:
                raise Overloaded(f"this node already has {counted(len(self._attempts), 'request')}, its maximum")
            if not request.inputs or request.key in self._attempts:
                raise BadRequest("a request needs inputs, and a key of its own")
            for each in request.inputs:
                if not 1 <= len(each.token_ids) <= limits.max_model_len:
                    raise BadRequest(f"an input has {len(each.token_ids)} tokens, not 1 to {limits.max_model_len}")
                if not 0 <= min(each.token_ids) <= max(each.token_ids) < limits.vocab_size:
                    raise BadRequest(f"a token id lies outside the vocabulary of {limits.vocab_size}")
                if not 0 <= each.second_at < len(each.token_ids):
                    raise BadRequest(f"the second segment begins at {each.second_at} of {len(each.token_ids)} tokens")
            if request.dimensions < 0:
                raise BadRequest(f"dimensions is {request.dimensions}")
        except KvRelayError as error:
            self._send_buffer.reply(identity, AttemptFailed(request.key, error.code, error.message))
            return
        attempt = self._attempts[request.key] = _Attempt(identity, request, self._clock())
        self._waiting.extend(_Waiting(attempt, place) for place in range(len(request.inputs)))

    def step(self) -> bool:
        """Compute the next batch, and answer the requests that it completes."""
        batch = self._next_batch()
        if not batch:
            return False
        self._steps += 1
        self._timer.begin(self._steps, self._clock())
        inputs = [(each.attempt.request, each.attempt.request.inputs[each.place]) for each in batch]
        try:
            vectors = self._compute(inputs)
        except Exception as error:  # one step's failure must not end the node
            log.exception("a step failed")
            self._timer.drop(self._steps)
            failure = EngineError(f"the step failed: {str(error).partition(chr(10))[0]}")
            for attempt in {each.attempt for each in batch}:
                self._end(attempt, AttemptFailed(attempt.request.key, failure.code, failure.message))
            return True
        tokens = sum(len(each.token_ids) for _, each in inputs)
        self._timer.end(self._steps, self._clock(), decodes=False, prompts=True, tokens=tokens)
        self._computed_tokens += tokens
        for (attempt, place), vector in zip(batch, vectors, strict=True):
            attempt.vectors[place] = vector
            if len(attempt.vectors) == len(attempt.request.inputs):
                found = [attempt.vectors[number] for number in range(len(attempt.vectors))]
                self._end(attempt, PoolResult(attempt.request.key, found))
        return True

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        room = self._limits.step_tokens
        while self._waiting:
            attempt, place = self._waiting[0]
            tokens = len(attempt.request.inputs[place].token_ids)
            if self._attempts.get(attempt.request.key) is not attempt:
                self._waiting.popleft()
                continue
            if batch and tokens > room:
                break
            batch.append(self._waiting.popleft())
            room -= tokens
        return batch

    def _end(self, attempt: _Attempt, answer: PoolResult | AttemptFailed) -> None:
        if self._attempts.pop(attempt.request.key, None) is not None:
            self._send_buffer.reply(attempt.identity, answer)

    def on_time(self, now_s: float) -> None:
        for key, each in list(self._attempts.items()):
            if now_s > each.arrived_s + each.request.timeout_s:
                del self._attempts[key]
        begun = sum(1 for each in self._attempts.values() if each.vectors)
        self.load = NodeLoad(
            running=begun,
            waiting=len(self._attempts) - begun,
            queued_tokens=sum(
                len(each.attempt.request.inputs[each.place].token_ids)
                for each in self._waiting
                if each.attempt.request.key in self._attempts
            ),
            prompt_tokens=self._computed_tokens,
            prompt_busy_s=self._timer.prompt_busy_s,
            steps_by_tokens=list(self._timer.by_tokens),
            step_tokens=self._timer.tokens,
        )

    @property
    def has_deadlines(self) -> bool:
        return bool(self._attempts)

    def describe_attempts(self) -> list[dict[str, Any]]:
        now_s = self._clock()
        return [
            {
                "attempt": str(key),
                "age_s": round(now_s - each.arrived_s, 3),
                "state": "pooling",
                "inputs": len(each.request.inputs),
                "computed_inputs": len(each.vectors),
            }
            for key, each in self._attempts.items()
        ]
