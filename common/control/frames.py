"""Sends and receives frames over one TCP connection. A frame is a length of four bytes, then the payload.

Used at both ends of a control link, on the asyncio loop of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Sequence
from typing import cast

from common.base.errors import Unavailable
from common.control.codec import MAX_MESSAGE_BYTES
from common.control.direct_writer import DirectWriter
from common.security.tls import shows_role

_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 16
"""Room for one message and the header of an array of messages."""

QUEUE_BYTES = 64 * 2**20
"""Maximum number of unsent bytes for a slow peer; beyond it, sending fails."""

SILENCE_S = 5.0
"""The kernel closes a connection whose other end is silent this long; it probes an idle connection every second."""

_FRAMES_PER_TURN, _BYTES_PER_TURN = 32, 2**15
"""Maximum number of frames, and of bytes before the last one, that are handled before other work on the loop gets its turn."""


def with_length(frame: bytes) -> bytes:
    """Put the length before a frame."""
    return len(frame).to_bytes(_LENGTH_BYTES, "big") + frame


class FrameConnection(asyncio.Protocol):
    """One connection of frames. It uses no future or task per message, because all traffic of a router passes here.

    `on_frame` may close the connection. `on_end(reason)` is called at most once, and not after `close`.
    """

    def __init__(
        self,
        on_frame: Callable[[bytes | bytearray], None],
        on_end: Callable[[str], None],
        on_open: Callable[[FrameConnection], None] = lambda _: None,
        on_growth: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_growth` is called when an unfinished frame has grown beyond `_BYTES_PER_TURN`."""
        self._on_frame, self._on_end, self._on_open = on_frame, on_end, on_open
        self._on_growth = on_growth
        self._transport: asyncio.Transport | None = None
        self._writer: DirectWriter | None = None
        self._rest: bytes | bytearray = b""
        """Bytes received and not yet handled."""
        self._paused = False
        self.waiting_since_s = math.inf
        """Time of the loop's clock since which the first frame, or the rest of a frame, is awaited; infinite if none is."""
        self.version = 0
        """The protocol version that the other end has agreed to; 0: none yet. The owner sets it."""
        self.malformed_frames = 0
        """Number of malformed frames; the owner counts them."""
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        _detect_silence(transport.get_extra_info("socket"))
        self.waiting_since_s = asyncio.get_running_loop().time()
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
        else:
            self._rest = data
        if not self._paused and self._handle_frames():
            self._paused = True
            assert self._transport is not None
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._resume)

    def resume_writing(self) -> None:
        if self._writer is not None:
            self._writer.drained()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._writer is not None:
            self._writer.close()
        while not self.closed and self._handle_frames():  # handle what arrived before the end
            pass
        self._end("broke" if exc is None else f"broke: {exc}")

    def send(self, frame: bytes) -> None:
        """Send without waiting. Raises: Unavailable if the connection is closed or its queue is full."""
        if self.closed or self._transport is None:
            raise Unavailable("cannot send: the connection is closed")
        if self.is_full:
            raise Unavailable("cannot send: its queue is full")
        if self._writer is not None:
            self._writer.write(with_length(frame))
        else:
            self._transport.write(with_length(frame))

    def enable_direct_sends(self) -> None:
        """Enable `send_directly`. It stays disabled on a TLS connection, whose state only the loop's thread may use."""
        assert self._transport is not None
        if self._transport.get_extra_info("ssl_object") is None:
            with contextlib.suppress(OSError):  # too many open files
                self._writer = DirectWriter(self._transport)

    def send_directly(self, frame: bytes) -> bool:
        """Send on the calling thread, which may be any. Returns False, and sends nothing, if only `send` can send now."""
        writer = self._writer
        if writer is None or self.closed or writer.is_behind:
            return False
        writer.write(with_length(frame))
        return True

    @property
    def is_full(self) -> bool:
        """Whether the unsent bytes have reached the limit, because the other end does not read."""
        if self._writer is not None:
            return self._writer.unsent_bytes >= QUEUE_BYTES
        return self._transport is not None and self._transport.get_write_buffer_size() >= QUEUE_BYTES

    @property
    def unfinished_bytes(self) -> int:
        """Bytes that were received of an incomplete frame."""
        return len(self._rest)

    @property
    def reached_itself(self) -> bool:
        """Whether the socket is connected to itself, which TCP may do if nobody listens on an ephemeral port."""
        assert self._transport is not None
        return self._transport.get_extra_info("sockname") == self._transport.get_extra_info("peername")

    @property
    def peer(self) -> str:
        """Host of the other end, for logs."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(name[0]) if name else ""

    def may_be(self, roles: Sequence[str]) -> bool:
        """Whether the other end's certificate names one of these roles; without TLS always true."""
        assert self._transport is not None
        secured = self._transport.get_extra_info("ssl_object")
        return secured is None or shows_role(secured, roles)

    def close(self) -> None:
        """Close the connection. Frames sent before are still delivered, if the other end reads them in time."""
        self.closed = True
        if self._writer is not None:
            self._writer.pass_on()
            self._writer.close()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection, and drop unsent frames."""
        self.closed = True
        if self._writer is not None:
            self._writer.close()
        if self._transport is not None:
            self._transport.abort()

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._on_end(reason)

    def _resume(self) -> None:
        if self.closed:
            return
        if self._handle_frames():
            asyncio.get_running_loop().call_soon(self._resume)
        else:
            self._paused = False
            assert self._transport is not None
            self._transport.resume_reading()

    def _handle_frames(self) -> bool:
        """Handle received frames, up to a maximum. Returns whether there may be more."""
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
            if at > _BYTES_PER_TURN:
                break
        if at:
            self.waiting_since_s = math.inf
        if at < len(data):
            # A large frame arrives in many pieces; do not copy the earlier pieces with each new one.
            self._rest = bytearray(memoryview(data)[at:]) if at or isinstance(data, bytes) else data
            if not more:
                if self.waiting_since_s == math.inf:
                    self.waiting_since_s = asyncio.get_running_loop().time()
                if len(self._rest) > _BYTES_PER_TURN:
                    self._on_growth()
        return more


def _detect_silence(sock: socket.socket) -> None:
    """Make the kernel detect within `SILENCE_S` that the other end has vanished, as far as it supports this."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": int(SILENCE_S)}
    options["TCP_USER_TIMEOUT"] = int(1000 * SILENCE_S)
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
