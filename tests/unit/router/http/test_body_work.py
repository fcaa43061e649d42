"""Bytes of bodies in work and in memory are bounded, and one client leaves half of each bound to others."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from typing import Any, cast

import pytest
from starlette.requests import Request

from common.base.errors import BadRequest, Overloaded
from router.http.body import body_deadlines, read_body
from router.http.body_work import BodyWork
from router.http.turns import FEW_BYTES

_SIZE = 100_000


def request_of(client: str) -> Request:
    return Request({"type": "http", "headers": [], "client": (client, 1)})


class Works:
    """Runs work that goes on until it is told to end."""

    def __init__(self, work: BodyWork) -> None:
        self.work = work
        self.begun: list[str] = []
        self._ends: dict[str, threading.Event] = {}

    def start(self, name: str, client: str, size: int = _SIZE) -> asyncio.Task[str]:
        end = self._ends[name] = threading.Event()

        def run() -> str:
            self.begun.append(name)
            assert end.wait(20)
            return name

        return asyncio.create_task(self.work.run(request_of(client), size, run))

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()

    async def until(self, *names: str) -> None:
        """Wait until exactly these have begun."""
        while len(self.begun) < len(names):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert sorted(self.begun) == sorted(names)


def play(scene: Any) -> None:
    asyncio.run(asyncio.wait_for(scene(Works(BodyWork(_SIZE))), 30))


def test_one_client_works_on_half_of_the_bytes_and_others_do_not_wait_for_it() -> None:
    async def scene(works: Works) -> None:
        tasks = [works.start(f"a{number}", "a") for number in range(4)]
        await works.until("a0", "a1")
        tasks += [works.start("b0", "b"), works.start("c0", "c"), works.start("d0", "d")]
        await works.until("a0", "a1", "b0", "c0")
        works.end("a0")
        await works.until("a0", "a1", "b0", "c0", "a2")
        works.end("b0")
        await works.until("a0", "a1", "b0", "c0", "a2", "d0")
        works.end("a1", "a2", "a3", "c0", "d0")
        assert len(await asyncio.gather(*tasks)) == 7

    play(scene)


def test_a_cancelled_request_counts_until_its_thread_is_done() -> None:
    async def scene(works: Works) -> None:
        first, second, third, fourth = (works.start(name, "a") for name in ("1", "2", "3", "4"))
        await works.until("1", "2")
        for task in (first, third):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await works.until("1", "2")
        works.end("1")
        await works.until("1", "2", "4")
        works.end("2", "4")
        assert [await second, await fourth] == ["2", "4"]

    play(scene)


def test_small_bodies_and_failed_work_take_nothing() -> None:
    async def scene(works: Works) -> None:
        work = works.work

        def fail() -> None:
            raise ValueError("it fails")

        for _ in range(9):
            with pytest.raises(ValueError, match="it fails"):
                await work.run(request_of("a"), _SIZE, fail)
        busy = [works.start(name, "a") for name in ("1", "2", "3")]
        await works.until("1", "2")
        assert await work.run(request_of("a"), FEW_BYTES, threading.get_ident) == threading.get_ident()
        assert await work.run(request_of("a"), 1, threading.get_ident, on_thread=True) != threading.get_ident()
        works.end("1", "2", "3")
        await asyncio.gather(*busy)

    play(scene)


def test_bodies_that_are_received_at_once_are_bounded_too() -> None:
    """Clients that never finish their bodies fill no memory."""

    async def scene(works: Works) -> None:
        deadlines = body_deadlines(20.0)
        sent = asyncio.Event()

        def reading(client: str, size: int) -> asyncio.Task[bytes]:
            parts = [b"x" * (size - 1), b"x"]

            async def receive() -> dict[str, Any]:
                if len(parts) == 1:
                    await sent.wait()
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

            scope = {"type": "http", "headers": [(b"content-type", b"application/json")], "client": (client, 1)}
            request = Request(scope, cast("Any", receive))
            return asyncio.create_task(read_body(request, _SIZE, deadlines, works.work))

        greedy = [reading("a", _SIZE) for _ in range(16)]
        await asyncio.sleep(0)
        refused, small, other = reading("a", _SIZE), reading("a", FEW_BYTES), reading("b", _SIZE)
        await asyncio.sleep(0)
        sent.set()
        with pytest.raises(Overloaded, match="too many large bodies"):
            await refused
        assert [len(body) for body in await asyncio.gather(*greedy, small, other)] == [_SIZE] * 16 + [FEW_BYTES, _SIZE]
        assert len(await reading("a", _SIZE)) == _SIZE, "all bytes were given back"

    play(scene)


@pytest.mark.parametrize("fails", [False, True])
def test_a_body_is_freed_with_its_request(*, fails: bool) -> None:
    """Cycles of objects waited hours for the router's garbage collector, each with megabytes."""

    class Body:
        pass

    async def scene(works: Works) -> None:
        gc.collect()
        gc.disable()
        try:
            body = Body()
            left = weakref.ref(body)

            def work(body: Body = body) -> None:
                if fails:
                    raise BadRequest("no")

            with contextlib.suppress(BadRequest):
                await works.work.run(request_of("a"), _SIZE, work)
            del body, work
            await asyncio.sleep(0.01)
            assert left() is None
        finally:
            gc.enable()

    play(scene)
