"""Attempts that wait: those that wait for a node are woken once the nodes that return together are there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from router.requests import retry_wait
from router.requests.retry_wait import RetryWait


class Noted:
    """A `RetryWait` whose calls are noted."""

    def __init__(self) -> None:
        self.retry_wait = RetryWait()
        self.called: list[str] = []

    def note(self, name: str) -> Callable[[], None]:
        return lambda: self.called.append(name)

    def until_node(self, name: str, wait_s: float = 60.0) -> None:
        self.retry_wait.until_node(name, wait_s, self.note(f"{name} wakes"), self.note(f"{name} gives up"))

    async def until(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.called) < count:
                await asyncio.sleep(0.001)


def play(scene: Callable[[Noted], Awaitable[None]]) -> list[str]:
    async def main() -> list[str]:
        noted = Noted()
        await scene(noted)
        assert not len(noted.retry_wait)
        return noted.called

    return asyncio.run(main())


def test_attempts_that_wait_for_a_node_wait_for_those_that_return_with_the_first() -> None:
    async def scene(noted: Noted) -> None:
        noted.until_node("a")
        noted.retry_wait.wake_soon()
        await asyncio.sleep(0)
        assert not noted.called  # the second node has not said that it is usable
        noted.until_node("b")
        noted.retry_wait.wake_soon()
        await noted.until(2)
        noted.until_node("c")
        noted.retry_wait.wake_soon()  # each return wakes again
        await noted.until(3)

    assert play(scene) == ["a wakes", "b wakes", "c wakes"]


def test_an_attempt_whose_time_is_up_while_nodes_return_tries_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_wait, "WAKE_AFTER_S", 60.0)

    async def scene(noted: Noted) -> None:
        noted.until_node("a", 0.0)
        await noted.until(1)
        noted.until_node("b", 0.0)
        noted.retry_wait.wake_soon()
        await noted.until(2)
        noted.retry_wait.close()

    assert play(scene) == ["a gives up", "b wakes"]


def test_paused_and_removed_attempts_are_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_wait, "WAKE_AFTER_S", 0.0)

    async def scene(noted: Noted) -> None:
        noted.retry_wait.pause("paused", 60.0, noted.note("paused goes on"))
        for name in ("ended", "awake"):
            noted.until_node(name)
        noted.retry_wait.wake_soon()
        noted.retry_wait.remove("ended")
        await noted.until(1)
        assert len(noted.retry_wait) == 1
        noted.retry_wait.close()

    assert play(scene) == ["awake wakes"]
