"""Work on threads of its own, for callers that may have an asyncio loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def start_thread(work: Callable[[], ResultT], name: str) -> Future[ResultT]:
    """Begin `work` on a thread that the end of the process does not wait for."""
    ended: Future[ResultT] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return ended


def run_async(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine to its end. Raises: what the coroutine raises."""
    return start_thread(lambda: asyncio.run(coroutine), "asyncio").result()
