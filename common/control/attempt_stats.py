"""What a node reports about an attempt besides its tokens. Pure data."""

from __future__ import annotations

from typing import NamedTuple


class Mark(NamedTuple):
    """A moment of an attempt at a node."""

    name: str
    """Prefill nodes: `offer` sent, `grant` received, `chunk` of the prompt computed. Decode nodes: `offer` received, `grant`
    sent, `layer` received whole, `received` all KV, `first_token` received."""
    at_s: float
    """Seconds after the attempt's arrival at the node."""
    number: int = 0
    """The layer, or the prompt tokens computed so far."""


class AttemptStats(NamedTuple):
    """How an attempt was served; each of its two nodes sends it with its first chunk."""

    cached_tokens: int = 0
    """Prompt tokens found in this node's prefix cache."""
    relayed_bytes: int = 0
    queue_s: float = 0.0
    """Time from arrival to the first step that ran it."""
    prefill_s: float = 0.0
    """Time from that step to the first token, if this node computed the prompt."""
    computed_tokens: int = 0
    """Prompt tokens that this node computed, beyond `cached_tokens`."""
    transfer_s: float = 0.0
    """Decode nodes: time from the first token until all KV had arrived."""
    timeline: tuple[Mark, ...] = ()
