"""Fair shares of tenants, or of the users of one tenant. Each has a clock, which advances by the tokens of its requests. Pure.

The one with the earliest clock is next (start-time fair queueing); the clock of one that returns starts at the current virtual
time. Virtual time also advances by the share of each of those who wait: otherwise it would stand still while newcomers never
cease (a service's end users), and those who were served once would starve and be remembered for ever.

    Source: P. Goyal, H. Vin, H. Cheng, Start-Time Fair Queueing, 1996.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set


class FairShares:
    """The clocks of all who share."""

    def __init__(self) -> None:
        self._clocks: dict[str, float] = {}
        """Clocks ahead of `_now`, and those of all who were queued at the last turn."""
        self._now = 0.0
        """Virtual time."""

    def next(self, waiting: Collection[str]) -> str:
        """The name whose turn is next: the one with the earliest clock."""
        for name in waiting:
            self._clocks.setdefault(name, self._now)
        return min(waiting, key=self._clocks.__getitem__)

    def tokens_ahead(self, name: str, queued: Mapping[str, float]) -> float:
        """Number of tokens that are served before a new request of `name`.

        These are all that `name` has `queued`, and of every other name what its clock lags behind the new request's start, at
        most what it has queued.
        """
        own = queued.get(name, 0.0)
        begins = self._clocks.get(name, self._now) + own
        ahead = own
        for each, tokens in queued.items():
            if each != name:
                ahead += min(tokens, max(0.0, begins - self._clocks.get(each, self._now)))
        return ahead

    def serve(self, name: str, tokens: int, waiting: Set[str], queued: Set[str]) -> None:
        """`name`, one of those `waiting` for this turn, gets it. `queued`: all with requests in the queue.

        The clocks of names that could not take part, because their requests are less urgent or find no room, advance as far as
        virtual time.
        """
        begun, before = self._clocks[name], self._now
        self._clocks[name] = begun + tokens
        self._now = max(begun, before + tokens / (1 + len(waiting)))
        for each in (queued - waiting) & self._clocks.keys():
            self._clocks[each] += self._now - before
        self._clocks = {each: clock for each, clock in self._clocks.items() if clock > self._now or each in queued}

    def has_clock(self, name: str) -> bool:
        return name in self._clocks
