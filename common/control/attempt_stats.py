"""Statistics that a node reports about an attempt. Pure data."""

from __future__ import annotations

from typing import NamedTuple


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
