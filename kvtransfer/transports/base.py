"""The interface of a transport, as the two halves of a transfer end use it.

    Connector    sends: makes a `Peer` for each receiving rank
    Peer         one connection to send over: provides buffers to fill, sends messages, returns acks
    Listener     receives: returns the messages that have arrived (`Arrival`) and acknowledges them

All three are called by the I/O thread of their transfer end and never block it. From `send` until its ack, a
message's buffer belongs to the peer; the ack proves that nobody reads it any more. Buffers of a broken connection are
never reused.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import zmq

from common.base.errors import ConfigError, ProtocolError
from common.control.messages import AttemptKey
from common.control.versions import OLDEST_VERSION
from kvtransfer import wire
from kvtransfer.copy.cuda import CudaDevice
from kvtransfer.copy.device import POLL_S
from kvtransfer.mailbox import Command
from kvtransfer.send_state import Batch
from kvtransfer.transports.choose import TransportOffer

log = logging.getLogger(__name__)

Buffer = Any
"""[bytes] of uint8: a NumPy array, or a tensor on a CUDA device."""
Ready = set[Any]
"""The sockets and file descriptors that the poller found readable."""
_LONGEST_POLL_S = 2.0
"""Interval of the search for connections that are idle or silent."""
_LINE_BYTES = 64
MESSAGE_BYTES = 2 * 2**20
"""Size of a message through host memory, where it is not raised to that of one block of one layer."""


@dataclass(frozen=True)
class TransportContext:
    """Passed to connectors and listeners by their transfer end."""

    rank: int
    unit_bytes: int
    """One block of one layer: every message must have room for it."""
    poller: zmq.Poller
    post: Callable[[Command], None]
    """Runs a command on the I/O thread; callable from any thread."""
    device: CudaDevice | None = None
    """The device that holds this rank's KV; None if it is in CPU memory."""

    @property
    def make_host_buffer(self) -> Callable[[int], Buffer]:
        """Makes host buffers, [bytes] of uint8, that are efficient to copy KV from and to."""
        return _host_buffer if self.device is None else self.device.host_buffer


def poll(poller: zmq.Poller, timeout_ms: int, device_busy: object) -> Ready:
    """Wait up to that time for readable sockets; while a device is busy, return early to look at its marks."""
    if not device_busy or not timeout_ms:
        return {socket for socket, _ in poller.poll(timeout_ms)}
    ready = {socket for socket, _ in poller.poll(0)}
    if not ready:
        time.sleep(POLL_S)
    return ready


def poll_timeout_ms(deadline: float | None, now: float) -> int:
    """Milliseconds until `deadline`, at most `_LONGEST_POLL_S`."""
    wait_s = _LONGEST_POLL_S if deadline is None else min(max(deadline - now, 0.0), _LONGEST_POLL_S)
    return math.ceil(1000 * wait_s)


class Peer(ABC):
    """One connection of a sender, to one incarnation of one receiving rank.

    Invariant: at most `window` messages are unacknowledged, each in its own buffer. A peer that stops reading therefore
    holds that much memory and delays no other peer.
    """

    def __init__(self, transport: str, incarnation: str, *, message_bytes: int, window: int, now: float) -> None:
        self.transport = transport
        self.why = ""
        """Why this transport was chosen."""
        self.protocol = OLDEST_VERSION
        """Protocol version of the headers that are sent; acks have the oldest one."""
        self.is_fallback = False
        """A preferred transport could not be used."""
        self.incarnation = incarnation
        self.message_bytes = message_bytes
        """Maximum size of one message."""
        self.min_message_bytes = 0
        """Minimum size of a message while more of its transfer will follow."""
        self.transfers: dict[AttemptKey, int] = {}
        """Live transfers that send to this peer, and its rank there."""
        self.waiting: dict[AttemptKey, None] = {}
        """Transfers that may have something ready, in the order in which they became ready."""
        self.last_progress = now
        self.proven = False
        """An ack has arrived: both ends can really use this transport."""
        self.reserved = 0
        """Messages whose buffers are being filled."""
        self.lent: dict[int, tuple[Batch, Buffer]] = {}
        """Batches that the receiver reads from our blocks itself, and what names these blocks, by message; until their ack or
        `revoke`."""
        self.closed = False
        self._window = window
        self._sequence = 0
        self._in_flight: dict[int, tuple[Buffer, Batch]] = {}

    @property
    def has_room(self) -> bool:
        """Whether one more message may be sent."""
        return len(self._in_flight) + self.reserved < self._window

    @property
    def in_flight(self) -> int:
        """Messages sent and not acknowledged."""
        return len(self._in_flight)

    @property
    def unused(self) -> bool:
        """Whether no transfer needs it and no message is in flight."""
        return not (self.transfers or self.reserved or self._in_flight)

    def next_sequence(self) -> int:
        """The number of the next message."""
        self._sequence += 1
        return self._sequence

    def send(self, header: wire.SliceHeader, buffer: Buffer, batch: Batch, now: float) -> None:
        """Send `batch`, gathered in `buffer`, a buffer of `stage`."""
        if not self._in_flight:
            self.last_progress = now
        self._put(wire.encode(header, self.protocol), buffer, batch.size_bytes)
        self._in_flight[header.sequence] = buffer, batch

    def acks(self, ready: Ready, now: float) -> Iterator[tuple[wire.SliceAck, Batch]]:
        """The acks that have arrived, each once and with the batch it acknowledges; their buffers are free again.

        Raises: PeerLost, after the last of them, if the connection ended.
        """
        for data in self._replies(ready, now):
            try:
                ack = wire.decode_ack(data)
            except ProtocolError as error:
                log.warning("dropped a malformed ack: %s", error)
                continue
            sent = self._in_flight.pop(ack.sequence, None)
            if sent is not None:
                buffer, batch = sent
                self._free(buffer)
                self.last_progress = now
                self.proven = True
                yield ack, batch

    def behind(self, sequence: int) -> set[AttemptKey]:
        """The attempts that wait to send, or for the acks of messages that were sent after number `sequence`."""
        return {*self.waiting, *(batch.key for number, (_, batch) in self._in_flight.items() if number > sequence)}

    def revoke(self, sequence: int) -> Batch:
        """End a loan: the receiver will discard whatever it still reads of it, even if it hangs now."""
        return self.lent.pop(sequence)[0]

    def returned(self, sequence: int) -> Batch | None:
        """The ack of message `sequence` has arrived: the batch that it lent, if any."""
        batch, _ = self.lent.pop(sequence, (None, None))
        return batch

    def close(self) -> None:
        """Drop the connection and everything in flight on it. All loans must have been taken back before."""
        assert not self.lent
        self.closed = True
        self._in_flight.clear()
        self._close()

    @abstractmethod
    def stage(self) -> Buffer:
        """A buffer of at least `message_bytes`, contents undefined, to fill and pass to `send`."""

    def lend(self, buffer: Buffer, header: wire.SliceHeader, batch: Batch) -> bool:
        """Let the receiver read `batch` from its blocks itself; `buffer` then tells it where they are.

        False if this transport sends copies.
        """
        return False

    @abstractmethod
    def _put(self, header: bytes, buffer: Buffer, size_bytes: int) -> None:
        """Send a message without waiting; `_replies` reports a broken connection."""

    @abstractmethod
    def _replies(self, ready: Ready, now: float) -> Iterable[bytes | memoryview]:
        """Encoded acks that have arrived. Raises: PeerLost if the connection ended."""

    @abstractmethod
    def _free(self, buffer: Buffer) -> None:
        """`buffer` may be staged again."""

    @abstractmethod
    def _close(self) -> None: ...


class Connector(Protocol):
    """One transport at a sender."""

    @property
    def offer(self) -> TransportOffer:
        """This sender's offer, which has no endpoint."""
        ...

    def attach(self, context: TransportContext) -> None:
        """Called once, before all other methods.

        Raises: ConfigError if its messages have no room for one block of one layer.
        """
        ...

    def connect(self, offer: TransportOffer, incarnation: str, now: float) -> Peer:
        """A connection to the receiver that made `offer`. Raises: PeerLost if that is impossible."""
        ...

    def close(self) -> None:
        """Called last, when all peers are closed."""
        ...


@dataclass(frozen=True)
class Arrival:
    """One message that has arrived. `payload`, whose length is its size in bytes, may be read until `acknowledge`."""

    header: bytes | memoryview
    payload: np.ndarray | Any
    origin: Any
    """Where the listener sends the ack; opaque to others."""
    revoked: Callable[[], bool] = lambda: False
    """Whether the payload was lent and has been taken back: the data read may then be invalid."""

    @property
    def sender(self) -> str:
        """For logs."""
        return repr(self.origin)[:60]


class Listener(Protocol):
    """One transport at a receiver."""

    @property
    def offer(self) -> TransportOffer:
        """Where and how senders reach it."""
        ...

    def attach(self, context: TransportContext) -> None:
        """Called once, before all other methods."""
        ...

    def on_poll(self, ready: Ready, now: float) -> None:
        """Take over what the poller found; called once before a series of `receive` calls."""
        ...

    def receive(self) -> Arrival | None:
        """The next message; None if none waits."""
        ...

    def acknowledge(self, arrival: Arrival, ack: wire.SliceAck | None) -> None:
        """The payload is not read any more: tell its sender. None if the message could not be read."""
        ...

    def close(self) -> None:
        """Close everything; called last."""
        ...


class StagingPool:
    """Buffers of equal size, made when first needed; up to `keep` idle ones are kept.

    Its users bound its size: each peer has at most `window` buffers.
    """

    def __init__(self, buffer_bytes: int, keep: int, make: Callable[[int], Buffer] | None = None) -> None:
        self.buffer_bytes = buffer_bytes
        self._keep = keep
        self._make: Callable[[int], Buffer] = make or _host_buffer
        self._idle: list[Buffer] = []

    def take(self) -> Buffer:
        """[buffer_bytes], uint8, contents undefined."""
        return self._idle.pop() if self._idle else self._make(self.buffer_bytes)

    def give_back(self, buffer: Buffer) -> None:
        """Nobody reads `buffer` any more."""
        if len(self._idle) < self._keep and len(buffer) == self.buffer_bytes:
            self._idle.append(buffer)


def _host_buffer(size_bytes: int) -> Buffer:
    """Begins at a cache line, as rows of KV do: to copy a row to another place in its lines takes twice as long on Zen 3."""
    memory = np.empty(size_bytes + _LINE_BYTES, dtype=np.uint8)
    begin = -memory.ctypes.data % _LINE_BYTES
    return memory[begin : begin + size_bytes]


def fit_message(wanted_bytes: int, unit_bytes: int) -> int:
    """The size of a transport's messages: `wanted_bytes`, raised to `unit_bytes` (one block of one layer) if that is more.

    Raises: ConfigError if the unit is larger than any message a receiver takes.
    """
    size = min(max(wanted_bytes, unit_bytes), wire.MAX_PAYLOAD_BYTES)
    if unit_bytes > size:
        raise ConfigError(f"one block of one layer has {unit_bytes} bytes; a message has at most {size}")
    return size
