"""The life of one part of a pooling call as a state machine. Pure.

A part is placed, queued and retried like a generation (`PlacedRequest`), but one node answers it with one message. Parts are
stateless at the nodes, so an attempt carries all inputs again.
"""

from __future__ import annotations

from typing import ClassVar

from common.base.errors import EngineError
from common.control.messages import AttemptFailed
from common.control.pooling import PoolRequest
from router.pooling.work import PoolWork
from router.requests.flow_events import FinishPooled, Instructions, LegFailed, Pooled, Send
from router.requests.placed_request import PlacedRequest, Row, State
from router.requests.queued_request import Siblings


class PoolFlow(PlacedRequest):
    """One part. Its only leg has the role prefill, as nodes of pooling models have."""

    def __init__(self, request_id: str, work: PoolWork, max_attempts: int, siblings: Siblings) -> None:
        """`siblings`: all parts of the call."""
        super().__init__(request_id, max_attempts, siblings)
        self._work = work

    def _open(self, timeout_s: float) -> Instructions:
        self.state = State.POOLING
        leg, work = self._prefill, self._work
        assert leg is not None
        inputs, per_token = list(work.inputs), work.per_token
        return [Send(leg.peer, PoolRequest(self.key, inputs, work.normalize, work.dimensions, per_token, timeout_s))]

    def _on_pooled(self, event: Pooled) -> Instructions:
        incarnation, result = event
        leg = self._leg(incarnation)
        if leg is None or result.key.attempt != self.attempt:
            return []
        expected = [self._work.result_bytes(each) for each in self._work.inputs]
        if [len(vector) for vector in result.vectors] != expected:
            error = EngineError(f"{leg.peer.node_id} answered with vectors of another number or size")
            return self._on_leg_failed(LegFailed(incarnation, AttemptFailed(result.key, error.code, error.message)))
        return [*self._close_leg(leg), *self._end(FinishPooled(incarnation, result.vectors))]

    _TABLE: ClassVar[dict[State, Row]] = {
        **PlacedRequest._TABLE,
        State.POOLING: {**PlacedRequest._WITH_NODES, Pooled: _on_pooled},
    }
