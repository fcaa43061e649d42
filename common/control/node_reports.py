"""What nodes report: their load, with every `Pong`, and statistics of each attempt. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from common.base.message_types import StrictFields

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class NodeLoad(StrictFields):
    """A node's current load, and counters since the incarnation began."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    """Prompt tokens accepted but not yet computed."""
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_total: int = 0
    """All three count the blocks of one block table, so that a token takes the same part of a block for every model."""
    step_age_s: float = 0.0
    """Time since the engine loop's last iteration or, while asynchronous steps are in flight, since the last one that ended.
    A large value means that the engine is stuck."""
    prompt_tokens: int = 0
    prompt_busy_s: float = 0.0
    """Seconds of steps that computed prompts; `prompt_tokens` divided by it is the prefill speed."""
    step_s: float = 0.0
    """Mean duration of recent decode steps."""
    steps_by_tokens: list[int] = field(default_factory=list[int])
    """Number of steps by their tokens: up to the first of `STEP_TOKENS`, up to the second, ..., more than the last."""
    step_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    preemptions: int = 0
    relayed_bytes: int = 0
    relayed_by: dict[str, int] = field(default_factory=dict[str, int])
    """`relayed_bytes` by transport."""
    local_prefills: int = 0
    transfers_failed: int = 0
    drafted: dict[str, int] = field(default_factory=dict[str, int])
    """Draft tokens that steps verified, by method: `grammar` for those that a grammar forces, else a method of `--speculate`."""
    drafts_accepted: dict[str, int] = field(default_factory=dict[str, int])
    """How many of `drafted` were right, by method."""
    speculation_saved_s: float = 0.0
    """Estimated seconds of decode steps that drafts saved, less what wrong ones took."""
    draining: bool = False
    """The node finishes its requests and must get no new ones."""
    deferred: int = 0
    """Requests among `waiting` that do not wait for KV blocks or slots, but for relayed KV, a grammar or an adapter."""

    @property
    def idle(self) -> bool:
        """Whether the node has no attempt, and no blocks in use, such as those that wait for KV."""
        return not (self.running or self.waiting or self.kv_blocks_used)


class Mark(NamedTuple):
    """A moment of an attempt at a node."""

    name: str
    """At prefill nodes: `offer` sent, `grant` received, `chunk` of the prompt computed. At decode nodes: `offer` received,
    `grant` sent, `layer` received completely, `received` all KV, `first_token` received."""
    at_s: float
    """Seconds after the attempt's arrival at the node."""
    number: int = 0
    """The layer, or the prompt tokens computed so far."""


class AttemptStats(NamedTuple):
    """How one node served an attempt; each of the attempt's two nodes sends it with its first chunk."""

    cached_tokens: int = 0
    """Prompt tokens found in this node's prefix cache."""
    relayed_bytes: int = 0
    queue_s: float = 0.0
    """Time from the attempt's arrival to its first step."""
    prefill_s: float = 0.0
    """Time from that step to the first token, if this node computed the prompt."""
    computed_tokens: int = 0
    """Prompt tokens that this node computed, beyond `cached_tokens`."""
    transfer_s: float = 0.0
    """At decode nodes: time from the first token until all KV had arrived."""
    timeline: tuple[Mark, ...] = ()
