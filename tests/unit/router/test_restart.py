"""A router that shall restart fails its health checks, refuses what is new, and ends after its last request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import router.restart
from common.base.errors import RestartRequested, Unavailable
from router.restart import Restart


class StubDispatcher:
    def __init__(self) -> None:
        self.draining = False
        self.running = 0
        self.refused_with: Unavailable | None = None

    def refuse_new(self, error: Unavailable) -> None:
        self.refused_with = error


def test_a_restart_waits_for_the_last_request_and_refuses_only_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.restart, "_POLL_S", 0.001)

    async def scene() -> None:
        dispatcher: Any = StubDispatcher()
        dispatcher.running, busy = 1, [1]
        restart = Restart(dispatcher, lambda: busy[0])
        task = asyncio.create_task(restart.run())
        await asyncio.sleep(0)
        restart.begin(0.02, 60.0)
        assert (dispatcher.draining, dispatcher.refused_with) == (True, None)
        while dispatcher.refused_with is None:
            await asyncio.sleep(0.001)
        dispatcher.running = 0
        await asyncio.sleep(0.01)
        assert not task.done(), "its client has not read the whole answer"
        busy[0] = 0
        with pytest.raises(RestartRequested):
            await task

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_a_restart_does_not_wait_longer_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.restart, "_POLL_S", 0.001)

    async def scene() -> None:
        dispatcher: Any = StubDispatcher()
        dispatcher.running = 1
        restart = Restart(dispatcher, lambda: 1)
        restart.begin(0.0, 0.01)
        with pytest.raises(RestartRequested):
            await restart.run()

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_a_restart_that_is_asked_for_again_takes_the_shorter_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.restart, "_POLL_S", 0.001)

    async def scene() -> None:
        dispatcher: Any = StubDispatcher()
        dispatcher.running = 1
        restart = Restart(dispatcher, lambda: 1)
        task = asyncio.create_task(restart.run())
        restart.begin(600.0, 600.0)
        await asyncio.sleep(0.01)
        assert dispatcher.refused_with is None
        restart.begin(0.0, 600.0)
        while dispatcher.refused_with is None:
            await asyncio.sleep(0.001)
        assert not task.done()
        restart.begin(600.0, 600.0)
        restart.begin(0.0, 0.0)
        with pytest.raises(RestartRequested):
            await task

    asyncio.run(asyncio.wait_for(scene(), 10))
