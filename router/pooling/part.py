"""One part of a client's inputs, which one node pools. Router process, event loop.

A part is a request of the router like a generation: it is in the same table, admission queue, deadlines and stories.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from common.base.errors import KvRelayError, Unavailable
from router.policy import Fleet
from router.policy.filters import with_context, without
from router.pooling.flow import PoolFlow
from router.pooling.work import PoolWork
from router.requests import flow_events as f
from router.requests.queued_request import Siblings
from router.requests.router_state import RouterState
from router.requests.running_request import RunningRequest
from router.requests.story import Story

CLIENT_LEFT = "the client disconnected"


class PoolOutcome(NamedTuple):
    """How a part ended: with vectors, with an error, or (neither) because it was cancelled."""

    vectors: list[bytes] | None = None
    error: KvRelayError | None = None


class PoolPart(RunningRequest[PoolFlow]):
    """One part. `on_end(part)` is called once, after `outcome` was set."""

    _OUTCOME = PoolOutcome
    outcome: PoolOutcome | None

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
        flow = PoolFlow(request_id, work, max_attempts, siblings)
        super().__init__(request_id, flow, router, story, work.tenant, work.priority, deadline_s)
        self.work = work
        self.attempt = 0
        """The latest attempt that a node got."""
        self._fleet = router.fleets.by_role["prefill"]
        self._on_end = on_end
        self._why_cancelled = CLIENT_LEFT

    def cancel(self, why: str = CLIENT_LEFT) -> None:
        """End the part, because nobody needs it any more; if it has ended, do nothing. `why`: the reason that its story gives."""
        if self.outcome is None:
            self._why_cancelled = why
        super().cancel()

    def _notify(self) -> None:
        self._on_end(self)

    def prepare(self, choose: f.Choose) -> f.Answer:
        """Choose a node, or wait for one, or in the admission queue."""
        work, router = self.work, self._router
        at = pick(self._fleet, work.longest, choose.avoid | router.breakers.not_admitted())
        node = None if at is None else router.nodes.get(at)
        if node is None:
            return self._no_node(Unavailable(f"no node of {work.model} is available now; try again"))
        if choose.is_new:
            waits = self._enter_queue(None, self._queued(work.num_tokens))
            if waits is not None:
                return waits
        return f.Found(node.record.peer, None, self._timeout_s())

    def admit(self) -> None:
        """Count the attempt at the chosen node."""
        peer, router = self.flow.prefill_peer, self._router
        assert peer is not None
        figures = self._fleet.node(peer.incarnation)
        leg = {"node": peer.node_id, "tokens_before": figures.backlog, "requests_before": figures.requests}
        self.story.add("decision", f"attempt {self.flow.attempt}", {"mode": "pooled", "prefill": leg})
        router.breakers.chosen(peer.incarnation)

    def _on_sent(self) -> None:
        """Count the attempt, and the part no longer as waiting: a node that could not be reached got neither."""
        self.attempt = self.flow.attempt
        self._router.metrics.attempt("pooled", self.attempt)
        self._router.unanswered.discard(self.request_id)

    def _leg(self, incarnation: str) -> tuple[float, int, float]:
        return self.work.num_tokens, 0, 0.0

    def _finish(self, finish: f.FinishPooled) -> None:
        self._router.breakers.succeeded(finish.incarnation)
        self._end(PoolOutcome(finish.vectors))

    def _record_end(self, outcome: PoolOutcome) -> None:
        data = {"inputs": len(self.work.inputs), "prompt_tokens": self.work.num_tokens}
        if outcome.error is not None:
            self.story.add("failed", f"{outcome.error.code}: {outcome.error.message}", data)
        elif outcome.vectors is None:
            self.story.add("cancelled", self._why_cancelled, data)
        else:
            self.story.add("finished", data=data)

    _EXECUTE: ClassVar[dict[type, Callable[[Any, Any], None]]] = {**RunningRequest._EXECUTE, f.FinishPooled: _finish}


def pick(fleet: Fleet, num_tokens: int, avoid: frozenset[str]) -> str | None:
    """The incarnation with the least work that takes `num_tokens`; one in `avoid` only if no other does; None if none does."""
    fitting = with_context(fleet, num_tokens)
    able = without(fitting, avoid) or fitting

    def work(row: int) -> tuple[float, float, float]:
        node = able.nodes[row]
        return node.slow_backlog, node.slow_requests, random.random()

    best = min(range(len(able)), key=work, default=None)
    return None if best is None else able.incarnations[best]
