"""Bounds the bytes of request bodies that are read, that wait and that are worked on at once. Router's event loop.

Parsing and tokenizing take up to 30 times a body's size. So large bodies are worked on, on threads, only as far as the bytes
in work allow; the others wait in order. One client gets at most half of each bound: the other half stays for others.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request

from common.base.errors import Overloaded
from common.base.free_memory import release_free_memory
from router.http.client import client_of
from router.http.turns import FEW_BYTES

_T = TypeVar("_T")
_WORKED_ON, _HELD = 4, 32
"""Bodies of the largest size that are in work at once, and that are being read or wait."""
_LARGE = 2**18
_RELEASE_AFTER_S = 5.0


class ByteBudget:
    """Bytes of bodies, of which one client may have half."""

    def __init__(self, limit: int) -> None:
        self.most = limit // 2
        """What one client may have."""
        self._left = limit
        self._of = Counter[str]()

    def take(self, client: str, size: int) -> bool:
        """Take these bytes for a client. False, and nothing is taken, if they are beyond its half or there are not enough."""
        if size > self._left or not self.may_have(client, size):
            return False
        self._left -= size
        self._of[client] += size
        return True

    def may_have(self, client: str, size: int) -> bool:
        """Whether these bytes are within the client's half."""
        return self._of[client] + size <= self.most

    def give_back(self, client: str, size: int) -> None:
        self._left += size
        self._of[client] -= size
        if not self._of[client]:
            del self._of[client]


class _Waiter(NamedTuple):
    client: str
    size: int
    turn: asyncio.Future[None]


class BodyWork:
    """The work on all bodies of a router. Bodies of at most `FEW_BYTES` are never bounded."""

    def __init__(self, max_body_bytes: int) -> None:
        self._budget = ByteBudget(_WORKED_ON * max_body_bytes)
        self._held = ByteBudget(_HELD * max_body_bytes)
        self._waiters: deque[_Waiter] = deque()
        self._for_large = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4), "large-body")
        """Few threads, because streams need the processor too; smaller bodies do not wait for them."""
        self._release_due = False

    def hold(self, client: str, size: int) -> None:
        """Bytes of a body of this client are in memory, and not worked on. Raises: Overloaded if there are too many."""
        if not self._held.take(client, size):
            raise Overloaded("too many large bodies are being received; try again shortly", retry_after_s=1.0)

    def let_go(self, client: str, size: int) -> None:
        """The reverse of `hold`."""
        self._held.give_back(client, size)

    async def run(self, request: Request, size: int, work: Callable[[], _T], *, on_thread: bool = False) -> _T:
        """`work()` on the body of a request, of `size` bytes: on the event loop if it is small, unless `on_thread`; otherwise on a
        thread, once it may.

        Raises: Overloaded if too many bytes wait; what `work` raises.
        """
        if size <= FEW_BYTES:
            return await asyncio.to_thread(work) if on_thread else work()
        client, size = client_of(request.scope).name, min(size, self._budget.most)
        await self._turn(client, size)
        done = asyncio.get_running_loop().run_in_executor(self._for_large if size >= _LARGE else None, work)
        done.add_done_callback(partial(self._over, client, size))
        try:
            return await asyncio.shield(done)  # a thread cannot be cancelled: its bytes count until it is done
        finally:
            del done  # its exception refers to this frame: the body would wait for the garbage collector

    def close(self) -> None:
        """End the threads when their work is done."""
        self._for_large.shutdown(wait=False)

    async def _turn(self, client: str, size: int) -> None:
        """Wait until the body may be worked on."""
        waits = any(waiter.client == client for waiter in self._waiters)
        if not waits and self._budget.take(client, size):
            return
        self.hold(client, size)
        waiter = _Waiter(client, size, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            else:
                self._end(client, size)
            raise
        finally:
            self.let_go(client, size)

    def _over(self, client: str, size: int, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # it would be logged as never seen if the request was cancelled meanwhile
        self._end(client, size)
        if size >= _LARGE and not self._release_due:
            self._release_due = True
            asyncio.get_running_loop().call_later(_RELEASE_AFTER_S, self._release)

    def _end(self, client: str, size: int) -> None:
        """A body is not worked on any more: others may be, in order. Those of clients with too much in work are passed over."""
        self._budget.give_back(client, size)
        for waiter in list(self._waiters):
            if self._budget.take(waiter.client, waiter.size):
                self._waiters.remove(waiter)
                waiter.turn.set_result(None)
            elif self._budget.may_have(waiter.client, waiter.size):
                return

    def _release(self) -> None:
        """The C library keeps what tokenizing has freed, hundreds of megabytes, until it is told not to."""
        self._release_due = False
        asyncio.get_running_loop().run_in_executor(None, release_free_memory)
