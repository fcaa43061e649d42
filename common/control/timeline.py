"""The moments of an attempt that nodes report, for stories. Pure data."""

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
