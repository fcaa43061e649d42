"""Writes to a connection from any thread, at once and in order.

An asyncio transport belongs to its loop's thread. Another thread would have to wake that thread for each write, which costs
several times the write itself.
"""

from __future__ import annotations

import asyncio
import socket
import threading


class DirectWriter:
    """The only writer of a TCP connection; the transport only reads it. The loop creates and closes the writer.

    Bytes that the kernel does not accept at once go to the transport, and so do all later bytes until the transport has sent
    everything. So bytes keep their order.

    Raises: OSError if no file descriptor is left.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        # The writer has its own descriptor: the transport may close the other one, and another file may then get its number.
        self._socket: socket.socket | None = transport.get_extra_info("socket").dup()
        transport.set_write_buffer_limits(high=0)  # then `drained` is called even if it had only a few bytes to send
        self._lock = threading.Lock()
        self._rest = bytearray()
        """Bytes to pass to the transport."""
        self._transport_sends = False

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes that the kernel has not accepted. Loop only."""
        return len(self._rest) + self._transport.get_write_buffer_size()

    @property
    def is_behind(self) -> bool:
        """Whether the transport still has bytes to send, so that further bytes would have to wait."""
        return self._transport_sends or len(self._rest) > 0

    def write(self, data: bytes) -> None:
        """Write without waiting. Does nothing after `close`, nor on a broken connection, which the transport notices. Any
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
        """Note that the transport has sent everything; called by its protocol's `resume_writing`."""
        with self._lock:
            self._transport_sends = False

    def close(self) -> None:
        """Close the writer's descriptor and drop bytes that `pass_on` has not given to the transport. Loop only."""
        with self._lock:
            self._rest.clear()
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def pass_on(self) -> None:
        """Give the transport the bytes that the kernel has not accepted. Loop only."""
        with self._lock:
            rest, self._rest = self._rest, bytearray()
            self._transport_sends |= len(rest) > 0
        if rest:
            self._transport.write(rest)
            if not self._transport.get_write_buffer_size():
                self.drained()
