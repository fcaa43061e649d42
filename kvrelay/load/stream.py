"""A fast HTTP client for SSE streams: on few cores, a slow client would measure itself.

It uses httptools' C parser, takes a time stamp per event and parses JSON only afterwards. Runs on an asyncio loop. All
times are `time.perf_counter()`, which on Linux is the same clock in every process.
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
    """`asyncio.run` on the fastest event loop: a client may share its cores with the server that it measures."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


class RequestFailed(Exception):
    """The server responded with an error, or the stream broke. `kind` is short, for counting."""

    def __init__(self, message: str, kind: str = "connection") -> None:
        super().__init__(message)
        self.kind = kind


class Stream:
    """One POST and the events of its response. `ended` is set with the last one."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.status = 0
        self.headers: dict[str, str] = {}
        """The response headers x-kvrelay-* and retry-after."""
        self.sent_s = 0.0
        """When sending began, before a new connection was made: latencies include connecting."""
        self.ended_s = 0.0
        self.events: list[tuple[float, bytes]] = []
        """(arrival, data) of every event except [DONE]."""
        self.ended = asyncio.Event()
        self.done = False
        """[DONE] was seen."""
        self.error: RequestFailed | None = None
        self.connection: StreamConnection | None = None
        self._buffer = b""

    def feed(self, body: bytes, arrived_s: float) -> None:
        """Take a part of the response's body."""
        self._buffer += body
        if self.status != 200:
            return
        if b"\r" in self._buffer:  # line ends of some other servers; JSON contains no \r
            self._buffer = self._buffer.replace(b"\r\n", b"\n")
        *events, self._buffer = self._buffer.split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").removeprefix(b" ")
            if data == b"[DONE]":
                self.done = True
            elif not data.startswith(b":"):  # a comment, which keeps a connection alive
                self.events.append((arrived_s, data))

    def complete(self) -> None:
        """The response is complete."""
        error = None
        if self.status != 200:
            text = self._buffer[:_SHOWN_BYTES].decode(errors="replace")
            error = RequestFailed(f"HTTP {self.status}: {text}", f"HTTP {self.status}")
        self.finish(error)

    def finish(self, error: RequestFailed | None) -> None:
        """End the stream; only the first call counts."""
        if self.ended.is_set():
            return
        self.error = error
        self.ended_s = time.perf_counter()
        self.ended.set()

    def close(self) -> None:
        """Close the connection before the end; the server has to notice."""
        self.finish(None)
        if self.connection is not None:
            self.connection.close()


class StreamConnection(asyncio.Protocol):
    """One connection for one stream at a time. `on_free` is called when it can take the next."""

    def __init__(self, on_free: Callable[[StreamConnection], None]) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._on_free = on_free
        self._stream: Stream | None = None
        self._read_s = 0.0
        self.used = 0
        """Number of streams begun."""
        self.closed = False

    def begin(self, stream: Stream) -> None:
        """Send the request of `stream`; the response arrives in the background."""
        assert self._transport is not None
        assert self._stream is None
        self._stream = stream
        self.used += 1
        stream.connection = self
        self._transport.write(stream.request)

    def close(self) -> None:
        """Close the connection."""
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
        keep = self._parser.should_keep_alive() and not self.closed
        stream.complete()
        if keep:
            self._on_free(self)
        else:
            self.close()

    def _break(self, error: RequestFailed) -> None:
        self.close()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.finish(error)


class Target:
    """A server to send requests to: address, TLS, headers. Keeps idle connections for reuse.

    Raises: ValueError for a malformed URL.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        given = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n{given}"
        self._idle: list[StreamConnection] = []

    def stream(self, path: str, body: Mapping[str, Any]) -> Stream:
        """Build a request; `send` sends it."""
        payload = json.dumps(body).encode()
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(payload)}\r\n\r\n"
        return Stream(head.encode() + payload)

    async def send(self, stream: Stream) -> Stream:
        """Send on an idle connection or a new one. Raises: OSError if no connection can be made."""
        stream.sent_s = time.perf_counter()
        while self._idle and self._idle[-1].closed:
            self._idle.pop()
        connection = self._idle.pop() if self._idle else await self._connect()
        connection.begin(stream)
        return stream

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> StreamConnection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: StreamConnection(self._idle.append), self._host, self._port, ssl=self._tls
        )
        return connection
