"""Finds services of `kvrelay up` that run and answer nobody: an event loop that stands still. Supervisor's asyncio loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

from common.tools.up.child import Child
from common.tools.up.console import Console

PERIOD_S, _RETRY_S = 5.0, 0.5
_PATIENCE = 2
"""Probes in turn that a service may leave unanswered, each for `PERIOD_S`: longer than any lease, so that its requests run
elsewhere already, and longer than a busy machine makes it wait."""


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
        self._missed: dict[str, int] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            await asyncio.gather(*(self._probe(child) for child in self._children if child.ready))

    async def _probe(self, child: Child) -> None:
        pid, name = child.pid, child.spec.name
        try:
            async with asyncio.timeout(self._period_s):
                while not await self._answers(child):
                    await asyncio.sleep(_RETRY_S)
                answered = True
        except TimeoutError:
            answered = False
        if answered or child.pid != pid or not child.ready:
            self._missed.pop(name, None)
            return
        self._missed[name] = self._missed.get(name, 0) + 1
        if self._missed[name] >= _PATIENCE:
            del self._missed[name]
            self._console.say(f"{name} does not answer (pid {pid}): killing it")
            child.signal(signal.SIGKILL)
