"""What a simulated prefill node and a simulated decode node have in common. Pure."""

from __future__ import annotations

from typing import ClassVar, Protocol

from common.control.messages import NodeLoad, Role
from router.simulator.cache import BlockCache
from router.simulator.events import Events
from router.simulator.hardware import Shape
from router.simulator.request import SimRequest


class NodeOwner(Protocol):
    """Gets the events of a node."""

    def prefill_began(self, request: SimRequest) -> None:
        """A prefill node has taken the prompt's blocks: the decode node gets its offer."""
        ...

    def granted(self, request: SimRequest) -> None:
        """A decode node has room for a sequence that a prefill node computes; `decode_hit_blocks` is known."""
        ...

    def first_token(self, request: SimRequest) -> None:
        """The prompt is computed."""
        ...

    def finished(self, request: SimRequest) -> None:
        """The last token was generated."""
        ...

    def changed(self, node: SimulatedNode) -> None:
        """The node's load or its blocks changed."""
        ...


class SimulatedNode:
    """A node's blocks and what it has computed."""

    role: ClassVar[Role]

    def __init__(self, number: int, cache_blocks: int, shape: Shape, events: Events, owner: NodeOwner) -> None:
        self.node_id = f"{self.role}-{number}"
        self.cache = BlockCache(cache_blocks)
        self.requests = 0
        """Requests that got blocks."""
        self.busy_s = 0.0
        """Time spent on prompts."""
        self.prompt_tokens = 0
        """Prompt tokens computed."""
        self._events = events
        self._hardware = shape.hardware
        self._block_tokens = shape.block_tokens
        self._owner = owner

    def submit(self, request: SimRequest) -> None:
        """Queue a request."""
        raise NotImplementedError

    def load(self) -> NodeLoad:
        """The current load report."""
        raise NotImplementedError

    def _report(
        self, running: int, waiting: int, queued_tokens: int, step_s: float = 0.0, generated_tokens: int = 0
    ) -> NodeLoad:
        return NodeLoad(
            running,
            waiting,
            queued_tokens,
            kv_blocks_used=self.cache.capacity - self.cache.room,
            kv_blocks_total=self.cache.capacity,
            prompt_tokens=self.prompt_tokens,
            prompt_busy_s=self.busy_s,
            step_s=step_s,
            generated_tokens=generated_tokens,
        )

    def _begin_prefill(self, request: SimRequest) -> tuple[int, float]:
        """Begin to compute a prompt, of which `hit_blocks` are cached: (tokens to compute, seconds)."""
        known = request.hit_tokens(self._block_tokens, request.hit_blocks)
        tokens = request.input_tokens - known
        took_s = self._hardware.prefill_s(tokens, known)
        self.busy_s += took_s
        self.prompt_tokens += tokens
        request.prefill_began_s = self._events.now_s
        return tokens, took_s
