"""Finds services of `kvrelay up` that run but do not answer, because their event loop is blocked. Supervisor's asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable

from common.base.clock import monotonic, until_next
from kvrelay.up.child import Child
from kvrelay.up.console import Console

PERIOD_S = 10.0
"""Time between two probes of a service: each wakes two processes, also in an idle cluster."""
_PROBES, _RETRY_S = 2, 0.5
"""Consecutive missed probes before a kill, and the pause before the second. Each waits half a period: longer than any lease,
so that the service's requests run elsewhere already, and longer than a busy machine delays it. The second probe spares
services if this process itself stood still."""


class HangWatch:
    """Kills a service whose ready process does not answer; the supervisor restarts it."""

    def __init__(
        self,
        children: list[Child],
        console: Console,
        answers: Callable[[Child], Awaitable[bool]],
        period_s: float = PERIOD_S,
    ) -> None:
        """answers: whether a child answers a probe; it may take as long as it likes and must not raise."""
        self._children = children
        self._console = console
        self._answers = answers
        self._period_s = period_s

    async def run(self) -> None:
        """Probe all services until cancelled, at the same moments; one that does not answer delays no other's probe."""
        await asyncio.gather(*map(self._watch, self._children))

    async def _watch(self, child: Child) -> None:
        while True:
            await asyncio.sleep(until_next(self._period_s, monotonic()))
            pid = child.pid
            if child.ready and not await self._answers_in_time(child) and child.ready and child.pid == pid:
                self._console.say(f"{child.spec.name} does not answer (pid {pid}): killing it")
                child.signal(signal.SIGKILL)

    async def _answers_in_time(self, child: Child) -> bool:
        for _ in range(_PROBES):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s / 2):
                    while not await self._answers(child):
                        await asyncio.sleep(_RETRY_S)
                return True
        return False
