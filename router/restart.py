"""A restart of the router that an operator asked for: it ends without failing a request. Router process, event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from common.base.clock import monotonic
from common.base.errors import RestartRequested, Unavailable
from router.requests.dispatch import Dispatcher

_POLL_S = 0.1


class Restart:
    """First health checks fail, then new requests get 503, then, when the last one has ended, the process ends."""

    def __init__(self, dispatcher: Dispatcher, busy: Callable[[], int]) -> None:
        """`busy`: number of HTTP requests whose answers are not complete."""
        self._dispatcher = dispatcher
        self._busy = busy
        self._asked = asyncio.Event()
        self._refuse_s = self._until_s = math.inf
        """When new requests are refused, and when the process ends even if some still run."""

    def begin(self, grace_s: float, timeout_s: float) -> None:
        """Fail health checks now, refuse requests after `grace_s`, end `timeout_s` later. Asked again, the shorter times count."""
        refuse_s = monotonic() + grace_s
        self._refuse_s = min(self._refuse_s, refuse_s)
        self._until_s = min(self._until_s, refuse_s + timeout_s)
        self._dispatcher.draining = True
        self._asked.set()

    async def run(self) -> None:
        """Wait for `begin`, then for the last request.

        Raises: RestartRequested.
        """
        await self._asked.wait()
        while (left_s := self._refuse_s - monotonic()) > 0:
            await asyncio.sleep(min(left_s, _POLL_S))
        self._dispatcher.refuse_new(
            Unavailable("this router is about to restart; try again, at another router at once")
        )
        while (self._dispatcher.running or self._busy()) and monotonic() < self._until_s:
            await asyncio.sleep(_POLL_S)
        raise RestartRequested("an operator asked for a restart")
