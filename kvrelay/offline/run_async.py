"""Coroutines run from synchronous calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def run_async(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine to its end on a thread of its own, because the caller may have an asyncio loop.

    Raises: what the coroutine raises.
    """
    ended: Future[ResultT] = Future()

    def run() -> None:
        try:
            ended.set_result(asyncio.run(coroutine))
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name="asyncio", daemon=True).start()
    return ended.result()
