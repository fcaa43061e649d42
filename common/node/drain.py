"""Draining of a node: the node finishes its attempts, and its pongs tell every router to send no new ones. Pure.

Used on the node's asyncio loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.base.clock import Clock, monotonic
from common.control.links import Identity

_PINGS_UNTIL_KNOWN = 2
"""The pong to the first ping reports draining; a second ping proves that the sender has received it."""
_GAP = 1 / 12
"""Half the interval of pings, as a fraction of a lease. Pings that are closer together count once: they piled up while
this node was suspended, so the second one does not prove that the pong arrived."""


class Drain:
    """Whether this node drains, and which lease holders know that. Leases last `lease_s`."""

    def __init__(self, lease_s: float, clock: Clock = monotonic) -> None:
        self.active = False
        self._lease_s = lease_s
        self._clock = clock
        self._pings: dict[Identity, int] = {}
        self._counted_s: dict[Identity, float] = {}
        """Time of the latest ping that was counted."""
        self._silent_until_s: dict[Identity, float] = {}
        """Holders whose leases ended. This node itself may have been suspended, so that their messages are still unread."""

    def begin(self) -> None:
        """Start draining, or continue to drain."""
        if not self.active:
            self._pings.clear()
            self._counted_s.clear()
        self.active = True

    def end(self) -> None:
        """Accept new work again."""
        self.active = False

    def pinged(self, identity: Identity) -> None:
        """Note that `identity` renewed its lease; the pong is sent next."""
        now_s = self._clock()
        if self.active and now_s - self._counted_s.get(identity, -self._lease_s) >= _GAP * self._lease_s:
            self._counted_s[identity] = now_s
            self._pings[identity] = self._pings.get(identity, 0) + 1

    def lease_ended(self, identity: Identity) -> None:
        """Note that the lease of `identity` ended; for one more lease it may still come back with new work."""
        self._forget_silent()
        self._silent_until_s[identity] = self._clock() + self._lease_s

    def knows(self, identity: Identity) -> bool:
        """Whether `identity` knows that this node drains."""
        return self.active and self._pings.get(identity, 0) >= _PINGS_UNTIL_KNOWN

    def num_unaware(self, leases: Iterable[Identity]) -> int:
        """Number of holders of `leases` or of recently ended leases that do not know yet, so that they may send new work."""
        self._forget_silent()
        return sum(not self.knows(identity) for identity in {*leases, *self._silent_until_s}) if self.active else 0

    def _forget_silent(self) -> None:
        now_s = self._clock()
        self._silent_until_s = {i: until_s for i, until_s in self._silent_until_s.items() if now_s < until_s}
