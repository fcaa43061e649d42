"""FastAPI and uvicorn without a router behind them: what an HTTP answer and a stream of events cost at least."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator

import uvicorn
from bench.client import post
from bench.worker import Worker
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

_EVENT = b'data: {"id":"cmpl-0","object":"text_completion","created":0,"model":"bench","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
"""As long as a completion chunk of the router."""


class BareApp:
    """The serving process."""

    def __init__(self) -> None:
        app = FastAPI()
        app.post("/bare")(_bare)
        app.post("/events/{count}")(_events)
        app.post("/v1/completions")(_completion)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", access_log=False, loop="uvloop", http="httptools")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started and time.monotonic() < deadline:
            time.sleep(0.01)

    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        self._thread.join(10)


async def _bare() -> dict[str, str]:
    return {"status": "ok"}


async def _events(count: int) -> StreamingResponse:
    async def events() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield _EVENT

    return StreamingResponse(events(), media_type="text/event-stream")


async def _completion(request: Request) -> StreamingResponse:
    """As a router's stream of one token, without a router."""
    await request.json()
    return await _events(1)


class BareServer:
    """`BareApp` in a process of its own; a context manager."""

    def __enter__(self) -> BareServer:
        self._worker = Worker("bench.bare_http:BareApp")
        self.url: str = self._worker.call("url")
        self.pid = self._worker.pid
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()


async def round_trip_s(url: str, count: int) -> list[float]:
    """Seconds of `count` small POSTs, one after the other, each on a connection of its own."""
    times = []
    for _ in range(count):
        stream = await (await post(f"{url}/bare", {"prompt": "x"})).wait()
        times.append(stream.ended_s - stream.sent_s)
    return times


async def events_per_s(url: str, streams: int, events: int) -> float:
    """SSE events/s over `streams` concurrent streams of `events` each."""
    opened = [await post(f"{url}/events/{events}", {}) for _ in range(streams)]
    await asyncio.gather(*(stream.wait() for stream in opened))
    count = sum(len(stream.events) for stream in opened)
    return count / (max(s.ended_s for s in opened) - min(s.sent_s for s in opened))
