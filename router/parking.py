"""Attempts that are not placed yet: they wait for a node to come back, or for a backoff to pass.

Runs on the router's event loop. Invariant: a request waits here at most once, and not at all once it is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Parking:
    """At most one waiting attempt for each request."""

    def __init__(self) -> None:
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._parked: dict[str, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def pause(self, request_id: str, delay_s: float, then: Callable[[], None]) -> None:
        """Call `then` after `delay_s`."""
        self.forget(request_id)
        self._timers[request_id] = asyncio.get_running_loop().call_later(delay_s, self._fire, request_id, then)

    def park(self, request_id: str, wait_s: float, wake: Callable[[], None], give_up: Callable[[], None]) -> None:
        """Call `wake` when `wake_all` is called, or `give_up` if that does not happen within `wait_s`."""
        self.pause(request_id, wait_s, give_up)
        self._parked[request_id] = wake

    def wake_all(self) -> None:
        """A node came back: everything parked tries again. What is paused sleeps on."""
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
        self._parked.pop(request_id, None)
        then()
