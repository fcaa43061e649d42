"""Runs small work of a request on the event loop and large work on a thread, so that other streams go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_MOST = 16_384


async def maybe_on_thread(size: int, work: Callable[[], _T]) -> _T:
    """`work()` on the event loop if its input is small, else on a thread. size: in bytes or characters."""
    return work() if size <= _MOST else await asyncio.to_thread(work)
