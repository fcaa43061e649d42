"""Bounds the bytes of unfinished messages that peers send to a ZMQ socket, because ZMQ keeps all their parts in memory.

Works on Linux; elsewhere it does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import sys
from collections.abc import Generator

import zmq
from zmq.utils.monitor import recv_monitor_message

from common.base.clock import monotonic

log = logging.getLogger(__name__)

MAX_BYTES, MAX_BYTES_IN_ALL = 96 * 2**20, 2**30
"""Maximum bytes of unfinished messages of one peer, and of all peers together; a complete KV message has at most 66 MiB."""
_CHECK_S = 0.5
_INFO_BYTES, _RECEIVED_AT = 136, 128
"""Size of Linux's `struct tcp_info` up to and including `tcpi_bytes_received`, and the offset of that field."""


class BoundedMessages:
    """Receives from a listening socket and bounds its connections. Create it before `bind`; one thread at a time may use it."""

    def __init__(self, watched: zmq.Socket[bytes], max_message_bytes: int = 0) -> None:
        """max_message_bytes: size of the largest allowed message, if that may exceed `MAX_BYTES`."""
        self._watched = watched
        self._max_bytes = max(MAX_BYTES, max_message_bytes * 3 // 2)
        self._monitor: zmq.Socket[bytes] | None = None
        if sys.platform == "linux":
            self._monitor = watched.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._counted: dict[int, int] = {}
        """Bytes that each connection, by its file descriptor, had received when it last finished a message."""
        self._finished: set[int] = set()
        self._next_s = 0.0

    def receive(self) -> zmq.Frame:
        """Return the next part of a message that has arrived whole. Call it until it raises zmq.Again: no part waits."""
        try:
            frame = self._watched.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._check()
            raise
        if self._monitor is not None and not frame.more:
            with contextlib.suppress(zmq.ZMQError):  # its connection was never known, or has ended
                self._finished.add(int(frame.get(zmq.SRCFD)))
        return frame

    def _check(self) -> None:
        """Close the connections that exceed a bound. Called when no whole message waits; mostly returns at once."""
        now_s = monotonic()
        if self._monitor is None or now_s < self._next_s:
            return
        self._next_s = now_s + _CHECK_S
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._counted[event["value"]] = 0
            else:
                self._counted.pop(event["value"], None)
        sizes: dict[int, int] = {}
        for descriptor in self._counted:
            received = _received_bytes(descriptor)
            if descriptor in self._finished:
                self._counted[descriptor] = received
            sizes[descriptor] = received - self._counted[descriptor]
        self._finished.clear()
        for descriptor in sorted(sizes, key=sizes.__getitem__, reverse=True):
            if sizes[descriptor] <= self._max_bytes and sum(sizes.values()) <= MAX_BYTES_IN_ALL:
                break
            size = sizes.pop(descriptor)
            log.warning("closed a connection: its unfinished message has %d MB", size // 10**6)
            self._close(descriptor)

    def close(self) -> None:
        """Stop watching."""
        if self._monitor is not None:
            self._watched.disable_monitor()
            self._monitor.close(linger=0)

    def _close(self, descriptor: int) -> None:
        """Shut the connection down. ZMQ notices that and frees the message parts."""
        del self._counted[descriptor]
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:  # it may have ended by itself
            if connection.getsockname()[1] == self._port():  # the descriptor may have been reused for another file
                connection.shutdown(socket.SHUT_RDWR)

    def _port(self) -> int:
        return int(self._watched.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def _received_bytes(descriptor: int) -> int:
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return struct.unpack_from("Q", info, _RECEIVED_AT)[0]
    return 0


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Generator[socket.socket]:
    """Use a socket that ZMQ owns, without closing it."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
