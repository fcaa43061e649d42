"""A simulated prefill node: computes one prompt at a time, in order of arrival, and relays it over one link. Pure."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from common.control.messages import NodeLoad
from router.simulator.cache import BlockCache
from router.simulator.events import Events
from router.simulator.hardware import Hardware
from router.simulator.request import SimRequest


class PrefillOwner(Protocol):
    """Gets the events of a prefill node."""

    def prefill_began(self, request: SimRequest) -> None:
        """Its blocks are taken: the decode node gets its offer."""
        ...

    def first_token(self, request: SimRequest) -> None:
        """The prompt is computed."""
        ...

    def changed(self, node: SimulatedPrefillNode) -> None:
        """The node's load or its blocks changed."""
        ...


class SimulatedPrefillNode:
    """Invariant: at most one prompt is computed at a time; a prompt's blocks are in use until its relay is over."""

    def __init__(
        self,
        node_id: str,
        events: Events,
        hardware: Hardware,
        cache: BlockCache,
        block_tokens: int,
        owner: PrefillOwner,
    ) -> None:
        self.node_id = node_id
        self.cache = cache
        self.busy_s = 0.0
        """Time spent computing."""
        self.prompt_tokens = 0
        """Prompt tokens computed."""
        self.prompts = 0
        self._events = events
        self._hardware = hardware
        self._block_tokens = block_tokens
        self._owner = owner
        self._queue: deque[SimRequest] = deque()
        self._current: SimRequest | None = None
        self._link_free_s = 0.0
        self._queued_tokens = 0

    def load(self) -> NodeLoad:
        """The current load report."""
        cache = self.cache
        return NodeLoad(
            self.running,
            len(self._queue),
            self._queued_tokens,
            kv_blocks_used=cache.capacity - cache.room,
            kv_blocks_total=cache.capacity,
            prompt_tokens=self.prompt_tokens,
            prompt_busy_s=self.busy_s,
        )

    @property
    def waiting(self) -> int:
        """Prompts that have not begun."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """1 while a prompt is computed."""
        return int(self._current is not None)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens accepted and not computed."""
        return self._queued_tokens

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
        """Reserve the link for a relay. Returns when its last byte arrives.

        The relay overlaps the prefill except for one layer's share.
        """
        hardware, now_s = self._hardware, self._events.now_s
        duration_s = hardware.transfer_s(size_bytes)
        begin_s = max(self._link_free_s, request.prefill_began_s, now_s)
        computed_s = request.first_token_s if request.first_token_s >= 0 else self._ends_s
        self._link_free_s = max(begin_s + duration_s, computed_s + duration_s * hardware.tail)
        request.transfer_s = duration_s
        return self._link_free_s + hardware.link_latency_s

    def _start(self) -> None:
        if self._current is not None or not self._queue:
            return
        request = self._queue[0]
        hits = self.cache.take(request.hashes)
        if hits is None:
            return  # until a relay ends
        self._queue.popleft()
        self._current = request
        events = self._events
        known = request.hit_tokens(self._block_tokens, hits)
        took_s = self._hardware.prefill_s(request.input_tokens - known, known)
        self.busy_s += took_s
        self.prompt_tokens += request.input_tokens - known
        self.prompts += 1
        self._queued_tokens -= known
        request.hit_blocks = hits
        request.prefill_began_s = events.now_s
        self._ends_s = events.now_s + took_s
        events.at(self._ends_s, self._finish, request)
        self._owner.changed(self)
        self._owner.prefill_began(request)

    def _finish(self, request: SimRequest) -> None:
        self._current = None
        known = request.hit_tokens(self._block_tokens, request.hit_blocks)
        self._queued_tokens -= request.input_tokens - known
        request.first_token_s = self._events.now_s
        self._owner.changed(self)
        self._owner.first_token(request)
        self._start()
