"""An HTTP client for SSE streams that costs little: on few cores, a slow client would measure itself.

One connection per stream, httptools' C parser, a time stamp per event; JSON is looked at only afterwards.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Coroutine
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import httptools
import uvloop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on the event loop that costs least: the client shares its cores with what it measures."""
    return uvloop.run(main)


class RequestFailed(Exception):
    """The server answered with an error, or the stream broke."""


class Stream(asyncio.Protocol):
    """One POST and the events of its answer. `first` and `ended` are set as they happen.

    All times are `time.perf_counter()`, which on Linux is the same clock in every process.
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._buffer = b""
        self._status = 0
        self._transport: asyncio.Transport | None = None
        self._error: Exception | None = None
        self._read_s = 0.0
        self.sent_s = 0.0
        self.ended_s = 0.0
        self.events: list[tuple[float, bytes]] = []
        """(arrival, data) of every event but [DONE]."""
        self.first = asyncio.Event()
        self.ended = asyncio.Event()

    # ---- asyncio and httptools call these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.sent_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._read_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(RequestFailed(f"bad HTTP from the server: {error}"))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._buffer += body
        if self._status != 200:
            return
        *events, self._buffer = self._buffer.split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data != b"[DONE]":
                self.events.append((self._read_s, data))
        if self.events and not self.first.is_set():
            self.first.set()

    def on_message_complete(self) -> None:
        if self._status != 200:
            self._finish(RequestFailed(f"HTTP {self._status}: {self._buffer[:500].decode(errors='replace')}"))
        else:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(RequestFailed(f"the stream broke: {exc}"))

    # ---- the benchmark calls these

    async def wait(self, timeout_s: float = 600.0) -> Stream:
        """Until the answer is complete. Raises: RequestFailed, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self.ended.wait()
        if self._error is not None:
            raise self._error
        return self

    async def wait_first(self, timeout_s: float = 600.0) -> Stream:
        """Until the first event is in. Raises: RequestFailed, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self.first.wait()
        if self._error is not None:
            raise self._error
        return self

    def close(self) -> None:
        """Hang up; the server has to notice."""
        self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        if self.ended.is_set():
            return
        self._error = error
        self.ended_s = time.perf_counter()
        self.first.set()
        self.ended.set()
        if self._transport is not None:
            self._transport.close()

    # ---- what was measured

    def token_times(self) -> list[tuple[float, int]]:
        """(arrival, number of tokens) of everything that brought tokens; needs `return_token_ids`.

        Events that one read brought are one arrival: a client could not have seen the first of them before.
        Raises: RequestFailed for an error event.
        """
        found: list[tuple[float, int]] = []
        for arrived, data in self.events:
            event = json.loads(data)
            if "error" in event:
                raise RequestFailed(str(event["error"]))
            count = sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))
            if count and found and found[-1][0] == arrived:
                found[-1] = (arrived, found[-1][1] + count)
            elif count:
                found.append((arrived, count))
        return found

    def usage(self) -> dict[str, Any]:
        """The usage of the last event that carries one; {} if none does."""
        for _, data in reversed(self.events):
            usage = json.loads(data).get("usage")
            if usage:
                return usage
        return {}

    @property
    def ttft_s(self) -> float:
        """From sending the request to the first event with tokens."""
        return self.token_times()[0][0] - self.sent_s


async def post(url: str, body: dict[str, Any]) -> Stream:
    """Send `body` as JSON on a fresh connection; the answer arrives in the background."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    payload = json.dumps(body).encode()
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    request = head.encode() + payload
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: Stream(request), parts.hostname, parts.port)
    return stream


async def complete(url: str, model: str, prompt: list[int] | str, max_tokens: int) -> Stream:
    """A streamed greedy completion of exactly `max_tokens` tokens, their ids with them."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    return await post(f"{url}/v1/completions", body)


def gaps(streams: list[Stream], since_s: float = 0.0, until_s: float = float("inf")) -> list[tuple[float, float]]:
    """(arrival, seconds since the one before) for everything with tokens that arrived in [since, until)."""
    found = []
    for stream in streams:
        times = [arrived for arrived, _ in stream.token_times()]
        found += [(b, b - a) for a, b in itertools.pairwise(times) if since_s <= b < until_s]
    return found


def decode_rate(stream: Stream) -> float:
    """Tokens/s after the first event."""
    times = stream.token_times()
    return sum(count for _, count in times[1:]) / (times[-1][0] - times[0][0])
