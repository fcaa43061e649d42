"""A sender's connection to one receiving rank, and the memory it sends from. Used by the sender's I/O thread.

A payload is sent without a copy, so its staging buffer belongs to ZMQ until the receiver's ack proves that all
of it arrived. Buffers of a broken connection are dropped, never reused: ZMQ may still read them.
"""

from __future__ import annotations

import logging

import numpy as np
import zmq

from common.errors import ProtocolError
from common.protocol import AttemptKey
from kvtransfer import wire

log = logging.getLogger(__name__)


class StagingPool:
    """Equal buffers, made when first needed; up to `keep` idle ones are kept.

    Bounded by its users: a peer has at most `Peer.window` of them.
    """

    def __init__(self, buffer_bytes: int, keep: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._keep = keep
        self._idle: list[np.ndarray] = []

    def take(self) -> np.ndarray:
        """[buffer_bytes], uint8, contents undefined."""
        return self._idle.pop() if self._idle else np.empty(self.buffer_bytes, dtype=np.uint8)

    def give_back(self, buffer: np.ndarray) -> None:
        """Nobody reads `buffer` any more."""
        if len(self._idle) < self._keep:
            self._idle.append(buffer)


class Peer:
    """One connection, to one incarnation of one receiving rank.

    Invariant: at most `window` messages are unacknowledged, each in a staging buffer of its own; so a peer that
    stops reading holds that much memory and nothing of any other peer.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        pool: StagingPool,
        address: str,
        incarnation: str,
        *,
        window: int,
        now: float,
    ) -> None:
        self.address = address
        self.incarnation = incarnation
        self.transfers: dict[AttemptKey, int] = {}
        """Live transfers with a piece for this peer, and its rank there."""
        self.waiting: dict[AttemptKey, None] = {}
        """Those that may have something ready, in the order in which it became so."""
        self.last_progress = now
        self._window = window
        self._pool = pool
        self._poller = poller
        self._sequence = 0
        self._in_flight: dict[int, np.ndarray] = {}
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_HEADER_BYTES)
        # The window bounds what is queued; a send must never wait or fail for a full queue.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(address)
        except zmq.ZMQError:
            self._close_sockets()
            raise
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    @property
    def has_room(self) -> bool:
        return len(self._in_flight) < self._window

    @property
    def in_flight(self) -> int:
        """Messages sent and not acknowledged."""
        return len(self._in_flight)

    def readable(self, ready: set[object]) -> bool:
        """An ack may wait."""
        return self._socket in ready

    def broken(self, ready: set[object]) -> bool:
        """The connection ended. ZMQ would reconnect and resend some of what was lost; we start anew instead."""
        return self._monitor in ready

    def stage(self) -> np.ndarray:
        """A buffer to fill and give to `send`."""
        return self._pool.take()

    def next_sequence(self) -> int:
        """The number of the next message."""
        self._sequence += 1
        return self._sequence

    def send(self, header: wire.SliceHeader, buffer: np.ndarray, size_bytes: int, now: float) -> None:
        """Send the first `size_bytes` of `buffer`, which belongs to the connection from now on."""
        if not self._in_flight:
            self.last_progress = now
        self._in_flight[header.sequence] = buffer
        self._socket.send_multipart([wire.encode(header), buffer[:size_bytes].data], zmq.NOBLOCK, copy=False)

    def acks(self, now: float) -> list[wire.SliceAck]:
        """The acks that have come; their buffers are free again."""
        acks: list[wire.SliceAck] = []
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return acks
            try:
                ack = wire.decode_ack(b"".join(frames))
            except ProtocolError as error:
                log.warning("dropped an ack from %s: %s", self.address, error)
                continue
            buffer = self._in_flight.pop(ack.sequence, None)
            if buffer is not None:
                self._pool.give_back(buffer)
                self.last_progress = now
                acks.append(ack)

    def close(self) -> None:
        """Drop the connection and whatever is in flight on it."""
        self._poller.unregister(self._socket)
        self._poller.unregister(self._monitor)
        self._in_flight.clear()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
