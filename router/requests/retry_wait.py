"""Attempts that wait before they are placed again: for a node to return, or for a backoff to pass.

Runs on the router's event loop. Invariant: a request waits here at most once, and not at all once it is removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAKE_AFTER_S = 0.075
"""Nodes that return together answer within this time, so that waiting attempts can choose among all of them."""


class RetryWait:
    """At most one waiting attempt per request."""

    def __init__(self) -> None:
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._for_node: dict[str, Callable[[], None]] = {}
        self._waking: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._timers)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._timers

    def pause(self, request_id: str, delay_s: float, then: Callable[[], None]) -> None:
        """Call `then` after `delay_s`."""
        self.remove(request_id)
        self._timers[request_id] = asyncio.get_running_loop().call_later(delay_s, self._fire, request_id, then)

    def until_node(self, request_id: str, wait_s: float, wake: Callable[[], None], give_up: Callable[[], None]) -> None:
        """Call `wake` soon after a node returned, or `give_up` if none does within `wait_s`."""
        self.pause(request_id, wait_s, give_up)
        self._for_node[request_id] = wake

    def wake_soon(self) -> None:
        """A node returned: after `WAKE_AFTER_S` all attempts that wait for a node try again; those in a backoff do not."""
        if self._waking is None and self._for_node:
            self._waking = asyncio.get_running_loop().call_later(WAKE_AFTER_S, self._wake_all)

    def remove(self, request_id: str) -> None:
        """The request is over; one that is not here is ignored."""
        self._for_node.pop(request_id, None)
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Drop all waits without calling anything."""
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        for request_id in list(self._timers):
            self.remove(request_id)

    def _wake_all(self) -> None:
        self._waking = None
        woken, self._for_node = self._for_node, {}
        for request_id, wake in woken.items():
            # Waking one request may end another one, which must then not be woken.
            timer = self._timers.pop(request_id, None)
            if timer is not None:
                timer.cancel()
                wake()

    def _fire(self, request_id: str, then: Callable[[], None]) -> None:
        self._timers.pop(request_id, None)
        wake = self._for_node.pop(request_id, None)
        if wake is not None and self._waking is not None:
            wake()  # its time ran out while nodes were returning
        else:
            then()
