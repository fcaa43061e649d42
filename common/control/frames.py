"""Frames over one TCP connection: four bytes of length, and so many bytes. Both ends of a control link, on the loop of their process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from common.base.errors import Unavailable
from common.control.messages import MAX_MESSAGE_BYTES

_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 16
"""A message and what makes it an array of messages."""

QUEUE_BYTES = 64 * 2**20
"""So much may wait for a slow peer before sending to it fails."""

SILENCE_S = 5.0
"""So long the system waits for the other end's sign of life, for which it asks every second where nothing is sent."""

_FRAMES_PER_TURN = 32
"""So many frames are taken before everything else on the loop has its turn."""


def on_the_wire(frame: bytes) -> bytes:
    """The frame with its length before it."""
    return len(frame).to_bytes(_LENGTH_BYTES, "big") + frame


class FrameConnection(asyncio.Protocol):
    """Frames over TCP. Without a future or a task per message: a router's whole throughput passes here.

    `on_frame` may close it. `on_end(reason)` comes at most once, and not after `close`.
    """

    def __init__(
        self,
        on_frame: Callable[[bytes | bytearray], None],
        on_end: Callable[[str], None],
        on_open: Callable[[FrameConnection], None] = lambda _: None,
    ) -> None:
        self._on_frame, self._on_end, self._on_open = on_frame, on_end, on_open
        self._transport: asyncio.Transport | None = None
        self._rest: bytes | bytearray = b""
        """Has arrived and was not taken yet."""
        self._paused = False
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        _watch(transport.get_extra_info("socket"))
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
        else:
            self._rest = data
        if not self._paused and self._take():
            self._paused = True
            assert self._transport is not None
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

    def connection_lost(self, exc: Exception | None) -> None:
        while not self.closed and self._take():  # what came before the end counts
            pass
        self._end("broke" if exc is None else f"broke: {exc}")

    def send(self, frame: bytes) -> None:
        """Without waiting. Raises: Unavailable if it is over, or too much waits already."""
        if self.closed or self._transport is None:
            raise Unavailable("cannot send: the connection is closed")
        if self._transport.get_write_buffer_size() >= QUEUE_BYTES:
            raise Unavailable("cannot send: its queue is full")
        self._transport.write(on_the_wire(frame))

    @property
    def reached_itself(self) -> bool:
        """TCP does that on a machine where nobody listens on a port that a connecting socket may be given."""
        assert self._transport is not None
        return self._transport.get_extra_info("sockname") == self._transport.get_extra_info("peername")

    def close(self) -> None:
        """What was sent still goes out, if the other end takes it in time."""
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._on_end(reason)

    def _go_on(self) -> None:
        if self.closed:
            return
        if self._take():
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            self._paused = False
            assert self._transport is not None
            self._transport.resume_reading()

    def _take(self) -> bool:
        """Take the frames that are there, but not too many in a row; whether there may be more."""
        data, at = self._rest, 0
        self._rest = b""
        more = True
        for _ in range(_FRAMES_PER_TURN):
            begin = at + _LENGTH_BYTES
            end = begin + int.from_bytes(data[at:begin], "big")
            if len(data) >= begin and end - begin > _MAX_FRAME_BYTES:
                self._end(f"does not speak our protocol: a frame of {end - begin} bytes")
                return False
            if len(data) < end:
                more = False
                break
            at = end
            self._on_frame(data[begin:end])
            if self.closed:
                return False
        if at < len(data):
            # A large frame comes in many pieces, and what is there of it must not be copied with each.
            self._rest = bytearray(memoryview(data)[at:]) if at or isinstance(data, bytes) else data
        return more


def _watch(sock: socket.socket) -> None:
    """Let the system tell of an other end that is gone without a word, within `SILENCE_S`, as far as it can do that."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": int(SILENCE_S)}
    options["TCP_USER_TIMEOUT"] = int(1000 * SILENCE_S)
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
