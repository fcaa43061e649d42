"""An HTTP client for SSE streams that costs little: on few cores, a slow client would measure itself.

httptools' C parser, a time stamp per event, JSON looked at only afterwards. Runs on an asyncio loop. All times are
`time.perf_counter()`, which on Linux is the same clock in every process.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import httptools

T = TypeVar("T")

_SHOWN_BYTES = 500
_KEPT_HEADERS = (b"x-kvrelay-", b"retry-after")


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on the event loop that costs least: a client may share its cores with what it measures."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


class RequestFailed(Exception):
    """The server answered with an error, or the stream broke. `kind` is short, for counting."""

    def __init__(self, message: str, kind: str = "connection") -> None:
        super().__init__(message)
        self.kind = kind


class Stream:
    """One POST and the events of its answer. `first` and `ended` are set as they happen."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.status = 0
        self.headers: dict[str, str] = {}
        """Of the answer, what it says about itself: x-kvrelay-* and retry-after."""
        self.sent_s = 0.0
        self.ended_s = 0.0
        self.events: list[tuple[float, bytes]] = []
        """(arrival, data) of every event but [DONE]."""
        self.first = asyncio.Event()
        self.ended = asyncio.Event()
        self.done = False
        """[DONE] was seen."""
        self.error: RequestFailed | None = None
        self.connection: StreamConnection | None = None
        self._buffer = b""

    def feed(self, body: bytes, arrived_s: float) -> None:
        """A part of the answer's body."""
        self._buffer += body
        if self.status != 200:
            return
        if b"\r" in self._buffer:  # as some other servers end lines; JSON has none of its own
            self._buffer = self._buffer.replace(b"\r\n", b"\n")
        *events, self._buffer = self._buffer.split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").removeprefix(b" ")
            if data == b"[DONE]":
                self.done = True
            elif not data.startswith(b":"):  # a comment, which keeps a connection alive
                self.events.append((arrived_s, data))
        if self.events:
            self.first.set()

    def complete(self) -> None:
        """The answer's end has come."""
        if self.status != 200:
            text = self._buffer[:_SHOWN_BYTES].decode(errors="replace")
            self.finish(RequestFailed(f"HTTP {self.status}: {text}", f"HTTP {self.status}"))
        else:
            self.finish(None)

    def finish(self, error: RequestFailed | None) -> None:
        """Over, for whatever reason; only the first one counts."""
        if self.ended.is_set():
            return
        self.error = error
        self.ended_s = time.perf_counter()
        self.first.set()
        self.ended.set()

    async def wait(self, timeout_s: float = 600.0) -> Stream:
        """Until the answer is complete. Raises: RequestFailed, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self.ended.wait()
        if self.error is not None:
            raise self.error
        return self

    async def wait_first(self, timeout_s: float = 600.0) -> Stream:
        """Until the first event is in. Raises: RequestFailed, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self.first.wait()
        if self.error is not None:
            raise self.error
        return self

    def close(self) -> None:
        """Hang up; the server has to notice."""
        self.finish(None)
        if self.connection is not None:
            self.connection.close()

    def token_times(self) -> list[tuple[float, int]]:
        """(arrival, number of tokens) of everything that brought tokens; needs `return_token_ids`.

        Events that one read brought are one arrival: a client could not have seen the first of them before.
        Raises: RequestFailed for an error event.
        """
        found: list[tuple[float, int]] = []
        for arrived, data in self.events:
            event = json.loads(data)
            if "error" in event:
                raise RequestFailed(str(event["error"]), "stream")
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


class StreamConnection(asyncio.Protocol):
    """One connection, over which streams go one after the other. `on_free` is called when it can take another."""

    def __init__(self, on_free: Callable[[StreamConnection], None] | None = None) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._on_free = on_free
        self._stream: Stream | None = None
        self._read_s = 0.0
        self.used = 0
        """Streams begun."""
        self.closed = False

    def begin(self, stream: Stream) -> None:
        """Send the request of `stream`; the answer arrives in the background."""
        assert self._transport is not None
        assert self._stream is None
        self._stream = stream
        self.used += 1
        stream.connection = self
        stream.sent_s = time.perf_counter()
        self._transport.write(stream.request)

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    # ---- asyncio and httptools call these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._read_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(RequestFailed(f"bad HTTP from the server: {error}", "bad HTTP"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._break(RequestFailed(f"the stream broke: {exc or 'the server closed the connection'}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if self._stream is not None and lower.startswith(_KEPT_HEADERS):
            self._stream.headers[lower.decode("latin-1")] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._stream is not None:
            self._stream.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._stream is not None:
            self._stream.feed(body, self._read_s)

    def on_message_complete(self) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        keep = self._on_free is not None and self._parser.should_keep_alive() and not self.closed
        stream.complete()
        if keep and self._on_free is not None:
            self._on_free(self)
        else:
            self.close()

    def _break(self, error: RequestFailed) -> None:
        self.close()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.finish(error)


class Target:
    """Where requests go: address, TLS, the fixed part of every request. Keeps connections that are idle.

    Raises: ValueError for a URL that is none.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, *, keep_alive: bool = True) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// URL")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        self._keep_alive = keep_alive
        given = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n{given}"
        self._idle: list[StreamConnection] = []

    def stream(self, path: str, body: Mapping[str, Any]) -> Stream:
        """A request to be sent with `send`."""
        payload = json.dumps(body).encode()
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(payload)}\r\n\r\n"
        return Stream(head.encode() + payload)

    async def send(self, stream: Stream) -> Stream:
        """Send on an idle connection, or on a new one. Raises: OSError if there is no connection to be had."""
        connection: StreamConnection | None = None
        while self._idle and connection is None:
            candidate = self._idle.pop()
            connection = None if candidate.closed else candidate
        if connection is None:
            connection = await self._connect()
        connection.begin(stream)
        return stream

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> StreamConnection:
        on_free = self._idle.append if self._keep_alive else None
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: StreamConnection(on_free), self._host, self._port, ssl=self._tls
        )
        return connection


async def post(url: str, body: Mapping[str, Any]) -> Stream:
    """Send `body` as JSON on a fresh connection; the answer arrives in the background."""
    parts = urlsplit(url)
    target = Target(f"{parts.scheme}://{parts.netloc}", keep_alive=False)
    return await target.send(target.stream(parts.path, body))
