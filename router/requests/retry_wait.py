"""Attempts that are not placed yet: they wait for a node to come back, or for a backoff to pass.

Runs on the router's event loop. Invariant: a request waits here at most once, and not at all once it is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAKE_AFTER_S = 0.075
"""Nodes that come back together answer within so long; whoever waited for them then has the choice of all."""


class RetryWait:
    """At most one waiting attempt for each request."""

    def __init__(self) -> None:
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._parked: dict[str, Callable[[], None]] = {}
        self._waking: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._timers)

    def pause(self, request_id: str, delay_s: float, then: Callable[[], None]) -> None:
        """Call `then` after `delay_s`."""
        self.forget(request_id)
        self._timers[request_id] = asyncio.get_running_loop().call_later(delay_s, self._fire, request_id, then)

    def park(self, request_id: str, wait_s: float, wake: Callable[[], None], give_up: Callable[[], None]) -> None:
        """Call `wake` soon after a node came back, or `give_up` if none does within `wait_s`."""
        self.pause(request_id, wait_s, give_up)
        self._parked[request_id] = wake

    def wake_soon(self) -> None:
        """A node came back: in a moment everything parked tries again. What is paused sleeps on.

        At once, all of it would go to the first node of those that come back.
        """
        if self._waking is None and self._parked:
            self._waking = asyncio.get_running_loop().call_later(WAKE_AFTER_S, self._wake_all)

    def close(self) -> None:
        """Call nothing any more."""
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        for request_id in list(self._timers):
            self.forget(request_id)

    def _wake_all(self) -> None:
        self._waking = None
        parked, self._parked = self._parked, {}
        for request_id, wake in parked.items():
            # One may end another one's request; what it then forgot must not wake.
            timer = self._timers.pop(request_id, None)
            if timer is not None:
                timer.cancel()
                wake()

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._parked.pop(request_id, None)
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def _fire(self, request_id: str, then: Callable[[], None]) -> None:
        self._timers.pop(request_id, None)
        wake = self._parked.pop(request_id, None)
        if wake is not None and self._waking is not None:
            wake()  # its time is up in the very moment in which nodes come back
        else:
            then()
