"""A node's draining: it finishes what it has and tells every router, with its pongs, to send nothing new. Pure.

Lives on the node's asyncio loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.base.clock import Clock, monotonic
from common.control.links import Identity

_PINGS_UNTIL_TOLD = 2
"""The pong to the first ping says it; whoever pings again has had that pong."""
_GAP = 1 / 12
"""Of a lease, half the time between two pings: closer together come only pings that waited while this node stood still,
and the second of them was sent before the first had its pong."""


class Drain:
    """Whether this node drains, and which of those that hold a lease of `lease_s` here know it."""

    def __init__(self, lease_s: float, clock: Clock = monotonic) -> None:
        self.active = False
        self._lease_s = lease_s
        self._clock = clock
        self._pings: dict[Identity, int] = {}
        self._counted_s: dict[Identity, float] = {}
        """When the last ping that counts came."""
        self._silent_until_s: dict[Identity, float] = {}
        """Whose leases ended: perhaps it was this node that stood still, and what they sent is still to be read."""

    def begin(self) -> None:
        """Start, or go on."""
        if not self.active:
            self._pings.clear()
            self._counted_s.clear()
        self.active = True

    def end(self) -> None:
        """Take new work again."""
        self.active = False

    def pinged(self, identity: Identity) -> None:
        """Somebody renewed a lease; the pong is about to be sent."""
        now_s = self._clock()
        if self.active and now_s - self._counted_s.get(identity, -self._lease_s) >= _GAP * self._lease_s:
            self._counted_s[identity] = now_s
            self._pings[identity] = self._pings.get(identity, 0) + 1

    def lease_ended(self, identity: Identity) -> None:
        """Nobody heard of it past its lease; for one more it may still come back with new work."""
        self._silent_until_s[identity] = self._clock() + self._lease_s

    def told(self, identity: Identity) -> bool:
        """Whether it knows that this node drains."""
        return self.active and self._pings.get(identity, 0) >= _PINGS_UNTIL_TOLD

    def untold(self, leases: Iterable[Identity]) -> int:
        """How many may still send new work, because they cannot know yet: of these, and of those just lost."""
        now_s = self._clock()
        self._silent_until_s = {i: until_s for i, until_s in self._silent_until_s.items() if now_s < until_s}
        return sum(not self.told(identity) for identity in {*leases, *self._silent_until_s}) if self.active else 0
