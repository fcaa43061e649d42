"""What a transport is to the two ends that all transports share (`kvtransfer.sender`, `kvtransfer.receiver`).

    Connector    at a sender: makes a `Peer` for each receiving rank that it has something for
    Peer         one connection of a sender: buffers to fill, messages to send, acks to take
    Listener     at a receiver: gives the messages that have come, as `Arrival`s, and acknowledges them

All of it belongs to the I/O thread of its end and never blocks it. A message's buffer belongs to the peer from
`send` until its ack, which proves that nobody reads it any more; buffers of a broken connection are never reused.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import zmq

from common.base.errors import ConfigError, ProtocolError
from common.control.messages import AttemptKey
from kvtransfer import wire
from kvtransfer.copy.device import POLL_S, RelayDevice
from kvtransfer.mailbox import Command
from kvtransfer.transfer_state import Batch
from kvtransfer.transports.choose import TransportOffer

log = logging.getLogger(__name__)

Buffer = Any
"""[bytes] of uint8: a NumPy array, or a tensor on a CUDA device."""
Ready = set[Any]
"""The sockets and file descriptors that the poller found readable."""


@dataclass(frozen=True)
class EndContext:
    """What a connector or a listener gets from its end."""

    rank: int
    unit_bytes: int
    """The least that one message must be able to carry: one block of one layer."""
    poller: zmq.Poller
    post: Callable[[Command], None]
    """Run a command on the end's I/O thread; from any thread."""
    device: RelayDevice | None = None
    """Where this rank's KV is, if not in CPU memory."""

    @property
    def make_host_buffer(self) -> Callable[[int], Buffer]:
        """Makes buffers, [bytes] of uint8, from which and into which KV is copied best."""
        return _host_buffer if self.device is None else self.device.host_buffer


def poll(poller: zmq.Poller, timeout_ms: int, device_busy: object) -> Ready:
    """What is readable within that time; while a device is at work, at the latest when it is worth a look again."""
    if not device_busy or not timeout_ms:
        return {socket for socket, _ in poller.poll(timeout_ms)}
    ready = {socket for socket, _ in poller.poll(0)}
    if not ready:
        time.sleep(POLL_S)
    return ready


class Peer(ABC):
    """One connection of a sender, to one incarnation of one receiving rank.

    Invariant: at most `window` messages are unacknowledged, each in a buffer of its own; so a peer that stops
    reading holds that much memory and nothing of any other peer.
    """

    def __init__(self, transport: str, incarnation: str, *, message_bytes: int, window: int, now: float) -> None:
        self.transport = transport
        self.why = ""
        """Why this transport was chosen."""
        self.second_best = False
        """A transport that would have been chosen before this one did not come about."""
        self.incarnation = incarnation
        self.message_bytes = message_bytes
        """The most that one message carries."""
        self.transfers: dict[AttemptKey, int] = {}
        """Live transfers with a piece for this peer, and its rank there."""
        self.waiting: dict[AttemptKey, None] = {}
        """Those that may have something ready, in the order in which it became so."""
        self.last_progress = now
        self.proven = False
        """An ack has come: both ends can really use this transport."""
        self.reserved = 0
        """Messages whose buffers are being filled."""
        self.lent: dict[int, Batch] = {}
        """What the other end reads from our blocks themselves, by message; until its ack, or `take_back`."""
        self.closed = False
        self._window = window
        self._sequence = 0
        self._in_flight: dict[int, tuple[Buffer, Batch]] = {}

    @property
    def has_room(self) -> bool:
        """One more message may be sent."""
        return len(self._in_flight) + self.reserved < self._window

    @property
    def in_flight(self) -> int:
        """Messages sent and not acknowledged."""
        return len(self._in_flight)

    @property
    def unused(self) -> bool:
        """No transfer needs it, and nothing is under way on it."""
        return not (self.transfers or self.reserved or self._in_flight)

    def next_sequence(self) -> int:
        """The number of the next message."""
        self._sequence += 1
        return self._sequence

    def send(self, header: wire.SliceHeader, buffer: Buffer, batch: Batch, now: float) -> None:
        """Send `batch`, which lies in `buffer`, which came from `stage`."""
        if not self._in_flight:
            self.last_progress = now
        self._in_flight[header.sequence] = buffer, batch
        self._put(wire.encode(header), buffer, batch.size_bytes)

    def acks(self, ready: Ready, now: float) -> Iterator[tuple[wire.SliceAck, Batch]]:
        """The acks that have come, each once and with what was sent; their buffers are free again.

        Raises: PeerLost, after the last of them, if the connection ended.
        """
        for data in self._replies(ready, now):
            try:
                ack = wire.decode_ack(data)
            except ProtocolError as error:
                log.warning("dropped an ack: %s", error)
                continue
            sent = self._in_flight.pop(ack.sequence, None)
            if sent is not None:
                buffer, batch = sent
                self._free(buffer)
                self.last_progress = now
                self.proven = True
                yield ack, batch

    def take_back(self, sequence: int) -> Batch:
        """End a loan: whatever the other end still reads of it, it will discard, even if it stands still now."""
        return self.lent.pop(sequence)

    def returned(self, sequence: int) -> Batch | None:
        """The ack of message `sequence` has come: what it lent, if anything."""
        return self.lent.pop(sequence, None)

    def close(self) -> None:
        """Drop the connection and whatever is in flight on it. Loans are to be taken back before."""
        assert not self.lent
        self.closed = True
        self._in_flight.clear()
        self._close()

    @abstractmethod
    def stage(self) -> Buffer:
        """A buffer of at least `message_bytes`, contents undefined, to fill and give to `send` at once."""

    def lend(self, buffer: Buffer, header: wire.SliceHeader, batch: Batch, blocks: np.ndarray) -> bool:
        """Have the other end read `batch` from the sequence's `blocks` themselves; `buffer` then tells it where.

        False where this transport moves copies.
        """
        return False

    @abstractmethod
    def _put(self, header: bytes, buffer: Buffer, size_bytes: int) -> None:
        """Hand a message to the wire; never waits. A broken connection shows in `_replies`."""

    @abstractmethod
    def _replies(self, ready: Ready, now: float) -> Iterable[bytes]:
        """Encoded acks that have come. Raises: PeerLost if the connection ended."""

    @abstractmethod
    def _free(self, buffer: Buffer) -> None:
        """`buffer` may be staged again."""

    @abstractmethod
    def _close(self) -> None: ...


class Connector(Protocol):
    """One transport at a sender."""

    @property
    def offer(self) -> TransportOffer:
        """What this sender can do; without an endpoint."""
        ...

    def attach(self, context: EndContext) -> None:
        """Called once, before all else.

        Raises: ConfigError if its messages cannot carry one block of one layer.
        """
        ...

    def connect(self, offer: TransportOffer, incarnation: str, now: float) -> Peer:
        """A connection to a receiver's `offer`.

        Raises: PeerLost if that is impossible.
        """
        ...

    def close(self) -> None:
        """Called last; all peers are closed."""
        ...


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Arrival:
    """One message that has come. `payload`, whose length is its bytes, may be read until `acknowledge`."""

    header: bytes | memoryview
    payload: np.ndarray | Any
    origin: Any
    """Where its ack goes; the listener's own business."""
    revoked: Callable[[], bool] = _never
    """Whether the payload was lent and has been taken back: what was read of it until now may be anything."""


class Listener(Protocol):
    """One transport at a receiver."""

    @property
    def offer(self) -> TransportOffer:
        """Where and how senders reach it."""
        ...

    @property
    def malformed_messages(self) -> int:
        """Messages so far that could not be read; their senders may be anybody."""
        ...

    def attach(self, context: EndContext) -> None:
        """Called once, before all else."""
        ...

    def note(self, ready: Ready, now: float) -> None:
        """What the poller found; called once before a run of `receive`."""
        ...

    def receive(self) -> Arrival | None:
        """The next message, None if none waits."""
        ...

    def acknowledge(self, arrival: Arrival, ack: wire.SliceAck | None) -> None:
        """The payload is not read any more; tell its sender. None: the message could not be read."""
        ...

    def close(self) -> None:
        """Close everything; called last."""
        ...


class StagingPool:
    """Equal buffers, made when first needed; up to `keep` idle ones are kept.

    Bounded by its users: a peer has at most `window` of them.
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
        if len(self._idle) < self._keep:
            self._idle.append(buffer)


def _host_buffer(size_bytes: int) -> Buffer:
    return np.empty(size_bytes, dtype=np.uint8)


def fit_message(wanted_bytes: int, unit_bytes: int) -> int:
    """The size of a transport's messages: as wanted, but room for one block of one layer.

    Raises: ConfigError if that is more than a receiver takes.
    """
    size = min(max(wanted_bytes, unit_bytes), wire.MAX_PAYLOAD_BYTES)
    if unit_bytes > size:
        raise ConfigError(f"one block of one layer has {unit_bytes} bytes; at most {size} can be sent")
    return size
