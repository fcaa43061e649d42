"""The objects that all requests for one model share. Router process, event loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.base.clock import Clock
from router.metrics import ModelMetrics
from router.nodes.breaker import Breakers
from router.nodes.fleets import ModelFleets
from router.nodes.node_table import NodeTable
from router.requests.admission_queue import AdmissionQueue
from router.requests.deadlines import Deadlines
from router.requests.placement import Placer
from router.requests.retry_wait import RetryWait
from router.requests.story import Stories, Story


@dataclass(frozen=True, eq=False)
class RouterState:
    """The nodes, what is known of them, and the tables that know requests by id.

    `fleets`, `placer`, `metrics`, `unanswered` and `admission_queue` are the model's own, so that requests for one model never go
    to nodes of another, nor wait or are refused because of its load. The rest is the router's.
    """

    nodes: NodeTable
    fleets: ModelFleets
    breakers: Breakers
    placer: Placer
    metrics: ModelMetrics
    stories: Stories
    requests: dict[str, Any]
    """By id, the router's requests for all models."""
    unanswered: set[str]
    """Ids of the model's requests that have no token yet."""
    deadlines: Deadlines[str]
    admission_queue: AdmissionQueue
    retry_wait: RetryWait
    clock: Clock

    def enter(self, request_id: str, request: object, story: Story) -> None:
        """A request was accepted."""
        self.stories.enter(story)
        self.deadlines.add(request_id)
        self.requests[request_id] = request
        self.unanswered.add(request_id)

    def leave(self, request_id: str) -> None:
        """A request is over; one that is not here is ignored. Its story is kept for later questions."""
        self.requests.pop(request_id, None)
        self.unanswered.discard(request_id)
        for waits in (self.deadlines, self.admission_queue, self.retry_wait):
            waits.remove(request_id)
