"""The stub prefill and decode nodes in a process of their own, registered in Redis like real ones. A worker class."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from stub_node import StubNode

from common.membership import Registrar

_LEASE_S = 3.0


class StubService:
    """One stub node of each role on an event loop in a thread; generates as fast as it can."""

    def __init__(self, redis_url: str, model_path: str, vocab_size: int, max_len: int, tokens: list[int]) -> None:
        """`tokens`: what every request generates, in turn."""
        self._options: dict[str, Any] = {
            "model_path": model_path,
            "vocab_size": vocab_size,
            "max_len": max_len,
            "script": lambda index: tokens[index % len(tokens)],
        }
        self._redis_url = redis_url
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
        nodes = [
            StubNode("prefill", "stub-prefill", **self._options),
            StubNode("decode", "stub-decode", **self._options),
        ]
        registrars = [Registrar(self._redis_url, "default", node.record, lease_s=_LEASE_S) for node in nodes]
        tasks = [asyncio.create_task(registrar.run()) for registrar in registrars]
        await asyncio.gather(*(registrar.registered.wait() for registrar in registrars))
        self._ready.set()
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for registrar, node in zip(registrars, nodes, strict=True):
            await registrar.deregister()
            await node.close()
