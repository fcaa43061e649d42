"""HTTP/1.1 connections: uvicorn's protocol with additional time and size limits, which tells a request's handler when its client
disconnects. Runs on the event loop of a service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

DISCONNECTS = "kvrelay.disconnects"
"""Key of a request's `DisconnectListener` in its ASGI scope."""
_MAX_HEAD_BYTES = 65_536
"""Approximate limit for a request's line and headers, or for trailers. The parser buffers them until they are complete."""
_LINGER_S = 2.0
"""Time that a refused client has to read its refusal. If the connection were closed at once, with bytes of the client unread,
it would be reset and the refusal lost.
"""
_PHRASES = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class DisconnectListener:
    """Calls back when the client of one connection disconnects. A connection answers one request at a time.

    A callback costs far less than a task per request that waits for ASGI's `http.disconnect`.
    """

    __slots__ = ("_on_gone", "gone")

    def __init__(self) -> None:
        self.gone = False
        """Whether the client has disconnected."""
        self._on_gone: Callable[[], None] | None = None

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """Call `on_gone` when the client disconnects, at once if it has already; None ends the watch."""
        self._on_gone = on_gone
        if self.gone and on_gone is not None:
            on_gone()

    def leave(self) -> None:
        """Note that the client has disconnected."""
        self.gone = True
        if self._on_gone is not None:
            self._on_gone()


def listener_of(scope: Scope) -> DisconnectListener:
    """The listener of the request's connection."""
    return scope[DISCONNECTS]


class HttpConnection(HttpToolsProtocol):
    """One client connection. Invariant: while no request is being answered, a timer runs that closes the connection; a
    partial request or the rest of a refused body does not stop the timer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._listener = DisconnectListener()
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered, or was answered last; requests that arrived with it may wait behind it."""
        self._incomplete_bytes = 0
        """Bytes received since headers or a part of a body were last complete."""
        self._made_progress = False
        self._refused = False
        """Whether everything that the client still sends is discarded."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        timer, self._made_progress = self.timeout_keep_alive_task, False
        super().data_received(data)
        self._incomplete_bytes = 0 if self._made_progress else self._incomplete_bytes + len(data)
        if self._incomplete_bytes > _MAX_HEAD_BYTES and not self._refused:
            self._refuse(431, "The request's headers are too large.")
        if timer is not None and not self._refused and (not self.cycle or self.cycle.response_complete):
            self.timeout_keep_alive_task = self.loop.call_at(timer.when(), self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)  # this informs the last request only
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        self._listener.leave()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[DISCONNECTS] = self._listener

    def on_headers_complete(self) -> None:
        self._made_progress = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._made_progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.pipeline:
            # The rest of the body had paused reading, and is complete now. The end of a connection shows only while it is read.
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, lambda scope, receive, _: app(scope, receive, partial(self._send, cycle)))

    def _send(self, cycle: RequestResponseCycle, message: Any) -> Awaitable[None]:
        """Do what uvicorn's `send` does, but send the head of an answer together with its body."""
        if cycle.waiting_for_100_continue and message["type"] == "http.response.start":
            # The client may send something else than the body that it announced, and it would be read as the body.
            cycle.keep_alive = False
            message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        if not cycle.keep_alive:
            return self._send_and_close(cycle, message)
        if not (cycle.response_started or cycle.disconnected):
            cycle.transport = cast("asyncio.Transport", _DelayedHead(cycle))
        return cycle.send(message)

    async def _send_and_close(self, cycle: RequestResponseCycle, message: Any) -> None:
        """Send a message of an answer whose end closes the connection. A client that still sends its body gets time to read."""
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.scope["http_version"] == "1.0":
            _without_chunks(cycle, message)
        is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
        lingers = is_end and cycle.more_body and not (cycle.disconnected or self.transport.is_closing())
        cycle.keep_alive = lingers  # else `send` closes at once
        await cycle.send(message)
        if lingers:
            self._linger()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not an HTTP request."""
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Send an error, end our side, and close the connection after the client had time to read it.

        If a complete request is still being answered, its answer is finished, and the connection closed without this error.
        If the answer to the refused request has begun, or others must be sent before it, the connection is closed at once.
        """
        self._refused = True
        cycle = self.cycle
        if cycle and not cycle.response_complete:
            if not cycle.more_body:
                cycle.keep_alive = False
                return
            if cycle.response_started or self.pipeline:
                self.transport.close()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        lines = [b"HTTP/1.1 %d %s" % (status, _PHRASES[status])]
        lines += [b"%s: %s" % header for header in self.server_state.default_headers]
        lines += [
            b"content-type: text/plain; charset=utf-8",
            b"content-length: %d" % len(message),
            b"connection: close",
        ]
        self.transport.write(b"\r\n".join([*lines, b"", message.encode("ascii")]))
        self._linger()

    def _linger(self) -> None:
        """End our side, discard all further input, and close after the client had time to read the answer."""
        self._refused = True
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _should_upgrade(self) -> bool:
        return any(name == b"upgrade" for name, _ in self.headers)  # `_Parser` then parses the request again

    def head(self) -> bytes:
        """Request line and headers of the current request without `Upgrade`."""
        lines = [b"%s %s HTTP/%s" % (self.scope["method"].encode(), self.url, self.scope["http_version"].encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


def _without_chunks(cycle: RequestResponseCycle, message: Any) -> None:
    """Let an answer without a length end with the connection, because an HTTP/1.0 client does not know chunks."""
    if message["type"] == "http.response.start":
        if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
            cycle.chunked_encoding = False
    elif not cycle.expected_content_length:
        cycle.expected_content_length = len(message.get("body", b""))


class _DelayedHead:
    """Delays the head of an answer to send it together with the first part of the body, in one system call.

    It replaces the cycle's transport until the second write. If that does not come in the same turn of the event loop, the
    head is sent alone.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport, self._head = cycle, cycle.transport, b""

    def write(self, data: bytes) -> None:
        if not self._head:
            self._head = data
            asyncio.get_running_loop().call_soon(self._send)
            return
        self._cycle.transport = self._transport
        head, self._head = self._head, b""
        self._transport.writelines((head, data))

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._head and not self._transport.is_closing():
            self.write(b"")


class _Parser(httptools.HttpRequestParser):
    """Parses a request with an `Upgrade` header again without that header, because httptools reads no body after it. A server
    may ignore an upgrade (RFC 9110, 7.8), and clients that prefer HTTP/2 (those of Java) offer one with every request.
    """

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__(connection)
        self._connection = connection
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def feed_data(self, data: Any) -> None:
        parser = self
        while True:
            try:
                return super(_Parser, parser).feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = memoryview(data)[offer.args[0] :]
                # After `Connection: close` the old parser reads nothing more.
                parser = self._connection.parser = _Parser(self._connection)
                super(_Parser, parser).feed_data(self._connection.head())
