"""A simulated prefill node: computes one prompt at a time, in order of arrival, and relays it over one link. Pure."""

from __future__ import annotations

from collections import deque

from common.control.messages import NodeLoad
from router.simulator.events import Events
from router.simulator.hardware import Shape
from router.simulator.node import NodeOwner, SimulatedNode
from router.simulator.request import SimRequest


class SimulatedPrefillNode(SimulatedNode):
    """Invariant: at most one prompt is computed at a time; a prompt's blocks are in use until its relay is over."""

    role = "prefill"

    def __init__(self, number: int, shape: Shape, events: Events, owner: NodeOwner) -> None:
        super().__init__(number, shape.cache_blocks, shape, events, owner)
        self._queue: deque[SimRequest] = deque()
        self._queued_tokens = 0
        """Prompt tokens accepted and not computed."""
        self._computing = 0
        """Tokens of the current prompt that are being computed; 0 while there is none."""
        self._ends_s = 0.0
        """When the current prompt is computed."""
        self._link_free_s = 0.0

    def load(self) -> NodeLoad:
        """The current load report."""
        return self._report(int(self._computing > 0), len(self._queue), self._queued_tokens)

    def submit(self, request: SimRequest) -> None:
        """Queue a prompt."""
        self._queue.append(request)
        self._queued_tokens += request.input_tokens
        self._start()

    def release(self, request: SimRequest) -> None:
        """The relay of this prompt is over, or none is needed: its blocks may be evicted."""
        self.cache.release(request.hashes)
        self._start()

    def send_s(self, request: SimRequest, size_bytes: float) -> float:
        """Reserve the link for a relay, which overlaps all but one layer's share of the prefill. Returns when it arrives."""
        hardware = self._hardware
        duration_s = hardware.transfer_s(size_bytes)
        begin_s = max(self._link_free_s, request.prefill_began_s, self._events.now_s)
        computed_s = request.first_token_s if request.first_token_s >= 0 else self._ends_s
        self._link_free_s = max(begin_s + duration_s, computed_s + duration_s * hardware.tail)
        return self._link_free_s + hardware.link_latency_s

    def _start(self) -> None:
        if self._computing or not self._queue:
            return
        request = self._queue[0]
        hits = self.cache.take(request.hashes)
        if hits is None:
            return  # until a relay ends
        self._queue.popleft()
        self.requests += 1
        request.hit_blocks = hits
        self._computing, took_s = self._begin_prefill(request)
        self._queued_tokens -= request.input_tokens - self._computing
        self._ends_s = self._events.now_s + took_s
        self._events.at(self._ends_s, self._finish, request)
        self._owner.changed(self)
        self._owner.prefill_began(request)

    def _finish(self, request: SimRequest) -> None:
        self._queued_tokens -= self._computing
        self._computing = 0
        request.first_token_s = self._events.now_s
        self._owner.changed(self)
        self._owner.first_token(request)
        self._start()
