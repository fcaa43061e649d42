"""KV by torch.distributed: gloo between CPUs, NCCL between CUDA devices, a process group for each pair of ranks.

Headers and acks travel over ZMQ, payloads over the group, in the same order. The group is made when a sender first
connects: it asks for one, the receiver opens a store for both to meet in, and either end tears it down. Every
blocking call is made by the pair's own thread (`kvtransfer.transports.process_group`); all else by the I/O threads of both ends.

    sender -> receiver    [GroupRequest]   [GroupMeet]   [header, size]   [] as a life sign   [GroupLeave]
    receiver -> sender    [GroupReply]   [ack]
"""

from __future__ import annotations

import logging
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

import zmq
from pydantic import ConfigDict, Field

from common.base.clock import Clock, monotonic
from common.base.errors import ConfigError, PeerLost, ProtocolError
from common.control.messages import Codec
from common.engine.kv_transfer import STAGING_BYTES, OnReceiverEvent, OnSenderEvent
from common.kv.layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer import wire
from kvtransfer.copy.host import as_tensor
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.transports.base import Arrival, Buffer, EndContext, Peer, Ready, StagingPool, fit_message
from kvtransfer.transports.choose import GLOO, NCCL, TransportOffer
from kvtransfer.transports.process_group import RECEIVING, SENDING, GroupPlan, PairThread
from kvtransfer.transports.zmq import Context, DealerLink, RouterSocket

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Of building a group and of each payload: a peer that hangs for longer is given up."""
_LIFE_SIGN_S, _SILENT_S = 5.0, 30.0
_MAX_PAIRS = 256
WINDOW = 8
"""The most messages that a sender may have unacknowledged."""
_LINGER_MS = 500
_GRACE_S = 1.0
"""A thread that waits for a peer that hangs is left behind after so long; it ends at its own deadline."""
_SIZE = struct.Struct("<Q")
_ACK, _GROUP = b"a", b"g"

_STRICT = ConfigDict(extra="forbid")
_Name = Annotated[str, Field(max_length=256)]


@dataclass(frozen=True)
class GroupRequest:
    """A sender would like a group called `name`."""

    __pydantic_config__ = _STRICT
    name: _Name
    backend: _Name
    message_bytes: Annotated[int, Field(gt=0, le=wire.MAX_PAYLOAD_BYTES)]
    """The most that one payload has."""
    instead_of: _Name = ""
    """The sender's last group here, which it has left: over a broken link it could not say so."""


@dataclass(frozen=True)
class GroupMeet:
    """The sender is building its end now."""

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class GroupLeave:
    """The sender is closing the connection. One that is killed cannot say so: it is missed after `_SILENT_S`."""

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class GroupReply:
    """Where the store is; or, with an `error`, that there is no group, or none any more."""

    __pydantic_config__ = _STRICT
    name: _Name
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    error: Annotated[str, Field(max_length=4096)] = ""


_CODEC = Codec(GroupRequest, GroupMeet, GroupLeave, GroupReply)


def _has_room(backend: str, messages: Iterable[int], one_more: int) -> bool:
    """Whether a connection with messages of `one_more` bytes fits beside those that are: a card's memory is counted."""
    return backend != NCCL or WINDOW * (sum(messages) + one_more) <= STAGING_BYTES


def _buffer_maker(backend: str, end: EndContext) -> Callable[[int], Buffer]:
    """Makes [bytes] of uint8 where `backend` can send from and receive into."""
    if backend != NCCL:
        return end.make_host_buffer
    if end.device is None:
        raise ConfigError("NCCL needs KV on a CUDA device")
    return end.device.device_buffer


class CollectivePeer(Peer):
    """One connection: a ZMQ link, and a group as soon as the receiver has answered. Raises: PeerLost."""

    def __init__(
        self,
        link: DealerLink,
        pool: StagingPool,
        plan: GroupPlan,
        incarnation: str,
        post: Any,
        *,
        instead_of: str,
        window: int,
        now: float,
    ) -> None:
        super().__init__(plan.backend, incarnation, message_bytes=pool.buffer_bytes, window=window, now=now)
        self._link = link
        self._pool = pool
        self._name = plan.name
        self._usable = False
        self._answered = False
        self._over = False
        """The thread has ended, or is left behind."""
        self._failure = ""
        self._give_up_at = now + 2 * plan.timeout_s
        self._life_sign_at = now + _LIFE_SIGN_S
        self.pair = PairThread(
            f"kv-pair-to-{plan.name[:8]}",
            plan,
            on_ready=partial(post, self._ready),
            on_end=lambda reason: post(partial(self._ended, reason)),
        )
        try:
            self.pair.start()
        except RuntimeError as error:
            link.close()
            raise PeerLost(f"no thread for a group: {error}") from error
        link.send(_CODEC.encode(GroupRequest(plan.name, plan.backend, pool.buffer_bytes, instead_of)))

    @property
    def has_room(self) -> bool:
        """As `Peer.has_room`; not before the group is there."""
        return self._usable and super().has_room

    def stage(self) -> Buffer:
        """As `Peer.stage`."""
        return self._pool.take()

    def _put(self, header: bytes, buffer: Buffer, size_bytes: int) -> None:
        self._link.send(header, _SIZE.pack(size_bytes))
        self.pair.move(as_tensor(buffer)[:size_bytes], _nothing)

    def _replies(self, ready: Ready, now: float) -> Iterator[bytes]:
        for data in self._link.replies(ready):
            if data[:1] == _ACK:
                yield data[1:]
            else:
                self._on_reply(data[1:])
        if not self._usable and now >= self._give_up_at:
            self._failure = self._failure or "no process group came about"
        if self._failure:
            raise PeerLost(self._failure)
        if now >= self._life_sign_at:
            self._life_sign_at = now + _LIFE_SIGN_S
            self._link.send(b"")

    def _on_reply(self, data: bytes) -> None:
        try:
            reply = _CODEC.decode(data)
        except ProtocolError as error:
            log.warning("dropped an answer: %s", error)
            return
        if not isinstance(reply, GroupReply) or reply.name != self._name:
            return
        if reply.error:
            self._failure = reply.error
        else:
            self._answered = True
            self._link.send(_CODEC.encode(GroupMeet()))
            self.pair.meet(reply.port)

    def _ready(self) -> None:
        self._usable = True

    def _ended(self, reason: str) -> None:
        self._usable = False
        self._over = True
        self._failure = self._failure or reason
        if self.closed:
            self.close_link()

    def _free(self, buffer: Buffer) -> None:
        self._pool.give_back(buffer)

    def _close(self) -> None:
        # The link stays until the thread has ended: the other end may still wait for what is queued there.
        self._link.quiet()
        self.pair.stop()
        if self._answered:
            self._link.send(_CODEC.encode(GroupLeave()))
        if self._over:
            self.close_link()

    @property
    def is_left(self) -> bool:
        """Closed, and nothing of it is left."""
        return self._link.closed

    def close_link(self) -> None:
        """After `close`, when the thread has ended or is left behind."""
        self._link.close(linger_ms=_LINGER_MS if self._answered else 0)


class CollectiveConnector:
    """One backend at a sender, whose sockets are bound to `interface`, an address of this host.

    `card` is where NCCL's end has its KV. `staging_bytes` and `window`, of which no more than `WINDOW` is used, as of ZMQ.
    """

    def __init__(
        self,
        interface: str,
        *,
        backend: str = GLOO,
        card: str = "",
        staging_bytes: int = 2 * 2**20,
        window: int = WINDOW,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.offer = TransportOffer(backend, card=card)
        self._interface = interface
        self._backend = backend
        self._staging_bytes = staging_bytes
        self._window = min(window, WINDOW)
        self._timeout_s = timeout_s
        self._context: Context = zmq.Context()
        self._peers: list[CollectivePeer] = []
        self._names: dict[str, str] = {}
        """The last group at each endpoint, the latest last."""

    def attach(self, context: EndContext) -> None:
        """As `Connector.attach`. Raises: ConfigError."""
        self._end = context
        self._pool = StagingPool(
            fit_message(self._staging_bytes, context.unit_bytes),
            keep=self._window,
            make=_buffer_maker(self._backend, context),
        )

    def connect(self, offer: TransportOffer, incarnation: str, now: float) -> CollectivePeer:
        """As `Connector.connect`. Raises: PeerLost."""
        self._peers = [peer for peer in self._peers if not peer.is_left]
        size = self._pool.buffer_bytes
        if not _has_room(self._backend, [peer.message_bytes for peer in self._peers] + [size], size):
            raise PeerLost(f"{len(self._peers)} connections fill the memory that is set aside for staging on this card")
        try:
            store_host = urlsplit(offer.endpoint).hostname or ""
        except ValueError as error:
            raise PeerLost(f"{offer.endpoint!r} is no place: {error}") from error
        link = DealerLink(self._context, self._end.poller, offer.endpoint)
        plan = GroupPlan(
            backend=self._backend,
            name=secrets.token_hex(16),
            rank=SENDING,
            interface=self._interface,
            store_host=store_host,
            timeout_s=self._timeout_s,
        )
        peer = CollectivePeer(
            link,
            self._pool,
            plan,
            incarnation,
            self._end.post,
            instead_of=self._names.pop(offer.endpoint, ""),
            window=self._window,
            now=now,
        )
        self._peers.append(peer)
        if len(self._names) >= _MAX_PAIRS:
            del self._names[next(iter(self._names))]
        self._names[offer.endpoint] = plan.name
        return peer

    def close(self) -> None:
        """As `Connector.close`."""
        _join([peer.pair for peer in self._peers])
        for peer in self._peers:
            peer.close_link()
        self._context.destroy(linger=0)  # a link that somebody forgot must not hold this up for ever


@dataclass(eq=False)
class _Connection:
    """One sender at a receiver."""

    identity: bytes
    name: str
    pair: PairThread
    pool: StagingPool
    heard_at: float
    waiting: int = 0
    """Payloads under way or not yet taken."""


@dataclass(frozen=True)
class _Origin:
    connection: _Connection
    buffer: Buffer


class CollectiveListener:
    """One backend at a receiver. Its ZMQ socket and its groups are bound to `interface`, an address of this host.

    Raises: ConfigError when it cannot listen on tcp `interface`:`port`.
    """

    def __init__(
        self, interface: str, port: int, *, backend: str = GLOO, card: str = "", timeout_s: float = TIMEOUT_S
    ) -> None:
        self._interface = interface
        self._backend = backend
        self._timeout_s = timeout_s
        self._router = RouterSocket(interface, port, wire.MAX_HEADER_BYTES)
        self.offer = TransportOffer(backend, self._router.endpoint, card=card)
        self.malformed_messages = 0
        self._connections: dict[bytes, _Connection] = {}
        self._pairs: list[PairThread] = []
        self._arrived: deque[Arrival] = deque()
        self._now = 0.0

    def attach(self, context: EndContext) -> None:
        """As `Listener.attach`. Raises: ConfigError."""
        self._end = context
        self._make_buffer = _buffer_maker(self._backend, context)
        context.poller.register(self._router.socket, zmq.POLLIN)

    def note(self, ready: Ready, now: float) -> None:
        """As `Listener.note`."""
        self._now = now
        for connection in list(self._connections.values()):
            if now - connection.heard_at > _SILENT_S:
                self._drop(connection, "it was silent for too long")

    def receive(self) -> Arrival | None:
        """As `Listener.receive`."""
        while frames := self._router.receive(3):
            try:
                self._on_frames(frames[0].bytes, frames[1:])
            except ProtocolError as error:
                self.malformed_messages += 1
                log.warning("dropped a message: %s", error)
        return self._arrived.popleft() if self._arrived else None

    def acknowledge(self, arrival: Arrival, ack: wire.SliceAck | None) -> None:
        """As `Listener.acknowledge`."""
        origin: _Origin = arrival.origin
        origin.connection.waiting -= 1
        origin.connection.pool.give_back(origin.buffer)
        if ack is None:
            self.malformed_messages += 1
        else:
            self._router.send(origin.connection.identity, _ACK + wire.encode(ack))

    def close(self) -> None:
        """As `Listener.close`."""
        for connection in list(self._connections.values()):
            self._drop(connection, "closed")
        _join(self._pairs)
        self._router.close()

    def _on_frames(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        """One message. Raises: ProtocolError."""
        connection = self._connections.get(identity)
        if connection is not None:
            connection.heard_at = self._now
        if len(frames) == 2:
            self._expect(identity, connection, frames[0].bytes, frames[1].bytes)
        elif len(frames) != 1:
            raise ProtocolError(f"{len(frames)} frames")
        elif frames[0].bytes:
            self._on_control(identity, connection, _CODEC.decode(frames[0].buffer))

    def _on_control(self, identity: bytes, connection: _Connection | None, message: object) -> None:
        if isinstance(message, GroupRequest) and connection is None:
            self._join_group(identity, message)
        elif isinstance(message, GroupMeet) and connection is not None:
            connection.pair.meet(0)  # the store is our own
        elif isinstance(message, GroupLeave):
            if connection is not None:
                self._drop(connection, "the sender closed it")
        else:
            raise ProtocolError(f"a {type(message).__name__} out of turn")

    def _join_group(self, identity: bytes, request: GroupRequest) -> None:
        for connection in [c for c in self._connections.values() if c.name == request.instead_of]:
            self._drop(connection, "its sender has made another")
        self._pairs = [pair for pair in self._pairs if not pair.join(0.0)]
        messages = [connection.pool.buffer_bytes for connection in self._connections.values()]
        fits = len(self._pairs) < _MAX_PAIRS and _has_room(self._backend, messages, request.message_bytes)
        if request.backend != self._backend or not fits:
            error = f"no room for a {request.backend} group here, where {len(self._pairs)} {self._backend} groups are"
            self._reply(identity, GroupReply(request.name, error=error))
            return
        plan = GroupPlan(self._backend, request.name, RECEIVING, self._interface, self._interface, self._timeout_s)
        pair = PairThread(
            f"kv-pair-from-{request.name[:8]}",
            plan,
            on_ready=_nothing,
            on_end=lambda reason: self._end.post(partial(self._ended, identity, reason)),
        )
        try:
            port = pair.listen()
            pair.start()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread
            self._reply(identity, GroupReply(request.name, error=f"cannot open a store: {error}"))
            return
        pool = StagingPool(request.message_bytes, keep=WINDOW, make=self._make_buffer)
        self._connections[identity] = _Connection(identity, request.name, pair, pool, self._now)
        self._pairs.append(pair)
        self._reply(identity, GroupReply(request.name, port))

    def _expect(self, identity: bytes, connection: _Connection | None, header: bytes, size: bytes) -> None:
        """A payload is on its way. Raises: ProtocolError if it cannot be taken."""
        if connection is None:
            raise ProtocolError("a payload of a group that is no more")
        size_bytes = _SIZE.unpack(size)[0] if len(size) == _SIZE.size else 0
        if not 0 < size_bytes <= connection.pool.buffer_bytes or connection.waiting >= WINDOW:
            self._drop(connection, "it sends too much")
            raise ProtocolError(f"a payload of {size_bytes} bytes, {connection.waiting} are waiting")
        connection.waiting += 1
        buffer = connection.pool.take()
        arrival = Arrival(header, buffer[:size_bytes], _Origin(connection, buffer))
        connection.pair.move(
            as_tensor(arrival.payload), partial(self._end.post, partial(self._arrived.append, arrival))
        )

    def _ended(self, identity: bytes, reason: str) -> None:
        connection = self._connections.get(identity)
        if connection is not None:
            self._drop(connection, reason)

    def _drop(self, connection: _Connection, reason: str) -> None:
        """Leave a group and tell its sender. No transfer fails here: its slices may come again another way."""
        log.debug("left the group %s: %s", connection.name, reason)
        del self._connections[connection.identity]
        connection.pair.stop()
        self._reply(connection.identity, GroupReply(connection.name, error=f"the receiver left the group: {reason}"))

    def _reply(self, identity: bytes, reply: GroupReply) -> None:
        self._router.send(identity, _GROUP + _CODEC.encode(reply))


def _nothing() -> None:
    pass


def _join(pairs: list[PairThread]) -> None:
    """Wait for threads that were told to stop; not for those whose peer hangs."""
    deadline = time.monotonic() + _GRACE_S
    for pair in pairs:
        if not pair.join(max(0.0, deadline - time.monotonic())):
            log.warning("left a thread behind that waits for a peer that hangs; it ends at its own deadline")


class CollectiveSender(Sender):
    """`KVSender` over gloo alone; options as of `CollectiveConnector` and `Sender`. Raises: ConfigError."""

    def __init__(
        self,
        storage: KVStorage,
        layout: KVLayout,
        rank: int,
        interface: str,
        on_event: OnSenderEvent,
        *,
        staging_bytes: int = 2 * 2**20,
        window: int = 8,
        timeout_s: float = TIMEOUT_S,
        **options: Any,
    ) -> None:
        connector = CollectiveConnector(interface, staging_bytes=staging_bytes, window=window, timeout_s=timeout_s)
        super().__init__(storage, layout, rank, on_event, [connector], wanted="collective", **options)


class CollectiveReceiver(Receiver):
    """`KVReceiver` over gloo alone, on tcp `interface`:`port`. Raises: ConfigError."""

    def __init__(
        self,
        storage: KVStorage,
        layout: KVLayout,
        rank: int,
        interface: str,
        port: int,
        on_event: OnReceiverEvent,
        clock: Clock = monotonic,
        *,
        incarnation: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        listener = CollectiveListener(interface, port, timeout_s=timeout_s)
        super().__init__(storage, layout, rank, on_event, [listener], clock=clock, incarnation=incarnation)
