"""A node's draining: it finishes what it has and tells every router, with its pongs, to send nothing new. Pure.

Lives on the node's asyncio loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.rpc import Identity

_PINGS_UNTIL_TOLD = 2
"""The pong to the first ping says it; whoever pings again has had that pong."""


class Drain:
    """Whether this node drains, and which of those that hold a lease here know it."""

    def __init__(self) -> None:
        self.active = False
        self._pings: dict[Identity, int] = {}

    def begin(self) -> None:
        """Start, or go on."""
        if not self.active:
            self._pings.clear()
        self.active = True

    def end(self) -> None:
        """Take new work again."""
        self.active = False

    def pinged(self, identity: Identity) -> None:
        """Somebody renewed a lease; the pong is about to be sent."""
        if self.active:
            self._pings[identity] = self._pings.get(identity, 0) + 1

    def untold(self, leases: Iterable[Identity]) -> int:
        """How many of these may still send new work, because they cannot know yet."""
        return sum(self._pings.get(identity, 0) < _PINGS_UNTIL_TOLD for identity in leases) if self.active else 0
