"""Writes to a connection from any thread, at once and in order.

An asyncio transport belongs to its loop's thread: another thread has to wake that one for each write, which costs several
times the write itself.
"""

from __future__ import annotations

import asyncio
import socket
import threading


class DirectWriter:
    """The only writer of a TCP connection, beside the transport that reads it. Its loop creates and closes it.

    What the kernel does not take at once goes to the transport, and so does everything after it until the transport has sent
    all of it; so bytes keep their order.

    Raises: OSError if no file descriptor is left.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        # A descriptor of its own: the transport may close its own one, whose number another file then gets.
        self._socket: socket.socket | None = transport.get_extra_info("socket").dup()
        transport.set_write_buffer_limits(high=0)  # `drained` follows however little it had to send
        self._lock = threading.Lock()
        self._rest = bytearray()
        """For the transport."""
        self._transport_sends = False

    @property
    def unsent_bytes(self) -> int:
        """How much the kernel has not taken. Loop only."""
        return len(self._rest) + self._transport.get_write_buffer_size()

    @property
    def is_behind(self) -> bool:
        """Whether the transport has something to send, so that more would wait behind it."""
        return self._transport_sends or len(self._rest) > 0

    def write(self, data: bytes) -> None:
        """Write without waiting. Nothing happens after `close`, nor on a broken connection, which the transport notices. Any
        thread."""
        with self._lock:
            if self._socket is None:
                return
            sent = 0
            if not self.is_behind:
                try:
                    sent = self._socket.send(data)
                except BlockingIOError:
                    pass
                except OSError:
                    return
            if sent < len(data):
                if not self._rest:
                    self._loop.call_soon_threadsafe(self.pass_on)
                self._rest += memoryview(data)[sent:]

    def drained(self) -> None:
        """The transport has sent everything: its protocol's `resume_writing`."""
        with self._lock:
            self._transport_sends = False

    def close(self) -> None:
        """Close its descriptor and drop what the transport has not got: `pass_on` before keeps it. Loop only."""
        with self._lock:
            self._rest.clear()
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def pass_on(self) -> None:
        """Give the transport what the kernel has not taken. Loop only."""
        with self._lock:
            rest, self._rest = self._rest, bytearray()
            self._transport_sends |= len(rest) > 0
        if rest:
            self._transport.write(rest)
            if not self._transport.get_write_buffer_size():
                self.drained()
