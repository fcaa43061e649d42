"""How requests share the event loop: large work of one runs on a thread, and requests that arrive together take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from types import coroutine
from typing import TypeVar

_T = TypeVar("_T")
FEW_BYTES = 16_384
"""Work on at most this many bytes does not need a thread."""
MANY_BYTES = FEW_BYTES + 1


async def maybe_on_thread(size: int, work: Callable[[], _T]) -> _T:
    """`work()` on the event loop if its input is small, else on a thread. size: in bytes or characters."""
    return work() if size <= FEW_BYTES else await asyncio.to_thread(work)


@coroutine
def yield_turn() -> Generator[None]:
    """Let other requests reach this stage, so that the next stage runs for all in a row. Does what `asyncio.sleep(0)` does.

    The code path of a request does not fit the L1 and L2 instruction caches. If each request runs the whole path alone, it
    evicts the code that the next one needs.
    """
    yield
