"""Stub prefill and decode nodes that are registered in Redis like real ones, on the caller's loop or in a worker process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

from support.stub_node import StubNode

from common.cluster.membership import Registrar

_LEASE_S = 3.0


@contextlib.asynccontextmanager
async def stub_nodes(
    redis_url: str, model_path: str, vocab_size: int, max_len: int, tokens: list[int]
) -> AsyncIterator[None]:
    """One stub node of each role, once both are registered. They generate `tokens` in turn, as fast as they can."""
    options: dict[str, Any] = {
        "model_path": model_path,
        "vocab_size": vocab_size,
        "max_len": max_len,
        "script": lambda index: tokens[index % len(tokens)],
        "remembers": False,
    }
    nodes = [StubNode("prefill", "stub-prefill", **options), StubNode("decode", "stub-decode", **options)]
    registrars = [Registrar(redis_url, "default", node.record, lease_s=_LEASE_S) for node in nodes]
    tasks = [asyncio.create_task(registrar.run()) for registrar in registrars]
    try:
        await asyncio.gather(*(registrar.registered.wait() for registrar in registrars))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for registrar, node in zip(registrars, nodes, strict=True):
            await registrar.deregister()
            await node.close()


class StubService:
    """Those two on an event loop in a thread. A worker class."""

    def __init__(self, redis_url: str, model_path: str, vocab_size: int, max_len: int, tokens: list[int]) -> None:
        """As `stub_nodes`."""
        self._nodes = stub_nodes(redis_url, model_path, vocab_size, max_len, tokens)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if not self._ready.wait(30) or self._failure is not None:
            raise RuntimeError(f"the stub nodes did not start: {self._failure}")

    def close(self) -> None:
        """Stop both nodes."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()
            raise

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with self._nodes:
            self._ready.set()
            await self._stop.wait()
