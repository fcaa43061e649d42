"""One timer for deadlines that are all equally long."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest
from starlette.requests import Request

from common.base.errors import RequestTimeout
from router.http.body import body_deadlines, read_body
from router.http.body_work import BodyWork
from router.requests.deadlines import Deadlines

LONG_S = 0.2


def test_what_is_over_in_time_is_not_late_and_the_others_are_in_their_order() -> None:
    async def run() -> None:
        late: list[str] = []
        deadlines = Deadlines(LONG_S, late.append)
        for key in ("first", "over", "second"):
            deadlines.add(key)
        deadlines.remove("over")
        await asyncio.sleep(LONG_S / 2)
        deadlines.add("later")
        began_s = time.monotonic()
        while "second" in deadlines:
            await asyncio.sleep(0.001)
        assert late[:2] == ["first", "second"]
        while "later" in deadlines:
            await asyncio.sleep(0.001)
        assert late[2:] == ["later"]
        assert time.monotonic() - began_s > LONG_S * 0.9

    asyncio.run(run())


def test_the_timer_is_set_again_after_all_were_over() -> None:
    async def run() -> None:
        late: list[str] = []
        deadlines = Deadlines(LONG_S / 4, late.append)
        deadlines.add("over")
        deadlines.remove("over")
        await asyncio.sleep(LONG_S / 2)
        deadlines.add("late")
        await asyncio.sleep(LONG_S)
        assert late == ["late"]

    asyncio.run(run())


def test_late_may_remove_and_add_others() -> None:
    async def run() -> None:
        late: list[str] = []

        def on_late(key: str) -> None:
            late.append(key)
            deadlines.remove("gone")
            if key == "first":
                deadlines.add("again")

        deadlines = Deadlines(LONG_S / 4, on_late)
        deadlines.add("first")
        deadlines.add("gone")
        await asyncio.sleep(LONG_S)
        assert late == ["first", "again"]

    asyncio.run(run())


def test_nothing_is_late_after_close() -> None:
    async def run() -> None:
        late: list[str] = []
        deadlines = Deadlines(LONG_S / 4, late.append)
        deadlines.add("key")
        deadlines.close()
        await asyncio.sleep(LONG_S / 2)
        assert late == []

    asyncio.run(run())


def bodiless() -> Request:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError

    return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, cast("Any", receive))


def test_a_body_that_does_not_come_is_a_timeout_and_its_task_goes_on() -> None:
    async def run() -> None:
        with pytest.raises(RequestTimeout):
            await read_body(bodiless(), 100, body_deadlines(LONG_S / 4), BodyWork(100))
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()

    asyncio.run(run())


def test_who_is_cancelled_while_a_body_comes_is_cancelled() -> None:
    async def run() -> None:
        deadlines = body_deadlines(LONG_S)
        task = asyncio.create_task(read_body(bodiless(), 100, deadlines, BodyWork(100)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task not in deadlines

    asyncio.run(run())
