"""Attempts that wait: those for a node are woken once the nodes that come back together are there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from router.requests import retry_wait
from router.requests.retry_wait import RetryWait


class Lot:
    """A parking whose calls are counted."""

    def __init__(self) -> None:
        self.parking = RetryWait()
        self.called: list[str] = []

    def note(self, name: str) -> Callable[[], None]:
        return lambda: self.called.append(name)

    def park(self, name: str, wait_s: float = 60.0) -> None:
        self.parking.park(name, wait_s, self.note(f"{name} wakes"), self.note(f"{name} gives up"))

    async def until(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.called) < count:
                await asyncio.sleep(0.001)


def play(scene: Callable[[Lot], Awaitable[None]]) -> list[str]:
    async def main() -> list[str]:
        lot = Lot()
        await scene(lot)
        assert not len(lot.parking)
        return lot.called

    return asyncio.run(main())


def test_what_is_parked_waits_for_the_nodes_that_come_back_with_the_first() -> None:
    async def scene(lot: Lot) -> None:
        lot.park("a")
        lot.parking.wake_soon()
        await asyncio.sleep(0)
        assert not lot.called  # the second node has not said that it is usable
        lot.park("b")
        lot.parking.wake_soon()
        await lot.until(2)
        lot.park("c")
        lot.parking.wake_soon()  # each return wakes again
        await lot.until(3)

    assert play(scene) == ["a wakes", "b wakes", "c wakes"]


def test_one_whose_time_is_up_while_nodes_come_back_tries_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_wait, "WAKE_AFTER_S", 60.0)

    async def scene(lot: Lot) -> None:
        lot.park("a", 0.0)
        await lot.until(1)
        lot.park("b", 0.0)
        lot.parking.wake_soon()
        await lot.until(2)
        lot.parking.close()

    assert play(scene) == ["a gives up", "b wakes"]


def test_the_paused_and_the_forgotten_are_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_wait, "WAKE_AFTER_S", 0.0)

    async def scene(lot: Lot) -> None:
        lot.parking.pause("paused", 60.0, lot.note("paused goes on"))
        for name in ("ended", "awake"):
            lot.park(name)
        lot.parking.wake_soon()
        lot.parking.forget("ended")
        await lot.until(1)
        assert len(lot.parking) == 1
        lot.parking.close()

    assert play(scene) == ["awake wakes"]
