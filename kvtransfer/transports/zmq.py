"""The ZMQ transport: DEALER to ROUTER over TCP, one connection per pair of ranks that exchange KV.

A data message is `[header, payload]` (`kvtransfer.wire`), sent without copying it; with certificates, messages and acks are
sealed (`common.security.sealed_sockets`). Used by I/O threads of transfer ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import zmq

from common.base.bounded_messages import BoundedMessages
from common.base.endpoints import bind, connect, endpoint, tcp_place
from common.base.errors import ConfigError, PeerLost, ProtocolError
from common.base.resolve import NameUnknown, resolve_now
from common.security.sealed_endpoints import OVERHEAD_BYTES
from kvtransfer import wire
from kvtransfer.transports.base import (
    MESSAGE_BYTES,
    Arrival,
    Buffer,
    Peer,
    Ready,
    StagingPool,
    TransportContext,
    fit_message,
)
from kvtransfer.transports.choose import ZMQ, TransportOffer

if TYPE_CHECKING:
    from common.security.sealed_sockets import SealedServer
    from common.security.sealing import Channel

log = logging.getLogger(__name__)

Context = zmq.Context[zmq.Socket[bytes]]
CONNECT_TIMEOUT_MS = 2000
"""ZMQ makes a new connection attempt after this time, because TCP retries at growing intervals."""
HEARTBEAT_S, SILENCE_S = 2.0, 10.0
"""A link on which nothing arrives for `SILENCE_S`, not even heartbeat replies, counts as broken. Long enough to send a full
window over a slow network."""

_RESOLVE_S = 0.5
"""Time limit for the address of a host's name: relays to other peers wait meanwhile."""
GONE_S = 60.0
"""A receiver forgets a sender after this silence. Nothing waits for this, so it may be long."""


class DealerLink:
    """A DEALER connected to one ROUTER, which reports when the connection ends.

    ZMQ would reconnect and resend some of the lost messages; a new link is made instead.

    Raises: PeerLost if the endpoint is invalid or no socket can be opened.
    """

    def __init__(self, context: Context, poller: zmq.Poller, endpoint: str, server_key: bytes | None = None) -> None:
        """server_key: of a `SealedServer`."""
        self.channel: Channel | None = None
        """Seals messages and opens replies, if there is a key."""
        self._poller = poller
        self._monitor: zmq.Socket[bytes] | None = None
        try:
            self._socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise PeerLost(f"no socket for {endpoint!r}: {error}") from error
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_HEADER_BYTES)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        # The window limits what is queued; a send must never wait or fail because of a full queue.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * HEARTBEAT_S))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * SILENCE_S))
        try:
            if server_key is not None:
                from common.security.sealed_sockets import introduce

                self.channel = introduce(self._socket, server_key)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            connect(self._socket, endpoint)
        except (zmq.ZMQError, ProtocolError) as error:
            self._close_sockets()
            raise PeerLost(f"cannot connect to {endpoint!r}: {error}") from error
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def send(self, *frames: Any) -> None:
        """Send one message; the frames' memory belongs to ZMQ until the peer has acknowledged the message.

        After the connection has ended the message is dropped: `replies` reports the end next.
        """
        with contextlib.suppress(zmq.Again):  # the peer refused the connection, since `replies` was called
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def replies(self, ready: Ready) -> Iterator[bytes]:
        """The messages that have arrived, frames joined. Raises: PeerLost after the last if the connection ended."""
        while self._socket in ready:
            try:
                yield b"".join(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        if self._monitor in ready:
            raise PeerLost("the connection was lost")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._socket.closed

    def quiet(self) -> None:
        """Stop polling it; what is queued is still sent until `close`."""
        if self._socket in self._poller:
            self._poller.unregister(self._socket)
            self._poller.unregister(self._monitor)

    def close(self, linger_ms: int = 0) -> None:
        """Close it, and after `linger_ms` drop what is queued on it. Further calls do nothing."""
        if not self.closed:
            self.quiet()
            self._close_sockets(linger_ms)

    def _close_sockets(self, linger_ms: int = 0) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)


class ZmqPeer(Peer):
    """One connection over ZMQ."""

    def __init__(self, link: DealerLink, pool: StagingPool, incarnation: str, *, window: int, now: float) -> None:
        super().__init__(ZMQ, incarnation, message_bytes=pool.buffer_bytes - OVERHEAD_BYTES, window=window, now=now)
        self._link = link
        self._pool = pool

    def stage(self) -> Buffer:
        return self._pool.take()

    def _put(self, header: bytes, buffer: Buffer, size_bytes: int) -> None:
        payload, channel = buffer[:size_bytes].data, self._link.channel
        if channel is not None:
            header, content, payload = channel.seal(header), payload, buffer[: size_bytes + OVERHEAD_BYTES].data
            channel.seal_into(content, payload, context=header)
        self._link.send(header, payload)

    def _replies(self, ready: Ready, now: float) -> Iterator[bytes | memoryview]:
        channel = self._link.channel
        for reply in self._link.replies(ready):
            try:
                yield reply if channel is None else channel.open(reply)
            except ProtocolError as error:
                log.warning("dropped a reply: %s", error)

    def _free(self, buffer: Buffer) -> None:
        self._pool.give_back(buffer)

    def _close(self) -> None:
        self._link.close()


class ZmqConnector:
    """ZMQ at a sender. `message_bytes` is the maximum size of a message (raised to the size of one block of one layer
    where that is more), `window` the maximum number of unacknowledged messages per peer."""

    offer = TransportOffer(ZMQ)

    def __init__(self, *, message_bytes: int = MESSAGE_BYTES, window: int = 8) -> None:
        self._message_bytes = message_bytes
        self._window = window
        self._context: Context = zmq.Context()

    def attach(self, context: TransportContext) -> None:
        self._poller = context.poller
        size_bytes, keep = fit_message(self._message_bytes, context.unit_bytes), 2 * self._window
        self._pool = StagingPool(size_bytes + OVERHEAD_BYTES, keep, context.make_host_buffer)

    def connect(self, offer: TransportOffer, incarnation: str, now: float) -> ZmqPeer:
        link = DealerLink(self._context, self._poller, _resolved(offer.endpoint), offer.key)
        return ZmqPeer(link, self._pool, incarnation, window=self._window, now=now)

    def close(self) -> None:
        self._context.destroy(linger=0)


def _resolved(address: str) -> str:
    """`address` with an IP address for the host name: ZMQ would block the thread of all connections to resolve it.

    Raises: PeerLost.
    """
    place = tcp_place(address)
    if place is None:
        return address  # ZMQ refuses it
    host, port = place
    try:
        return endpoint("tcp", resolve_now(host, _RESOLVE_S), port)
    except NameUnknown as error:
        raise PeerLost(str(error)) from None


class RouterSocket:
    """A ROUTER on tcp `host`:`port` (0: any free port) that refuses messages above `max_bytes`.

    Raises: ConfigError when it cannot listen there.
    """

    def __init__(self, host: str, port: int, max_bytes: int, sealed: SealedServer | None = None) -> None:
        """sealed: decides which senders may connect; None: all may."""
        self._context: Context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        # Without it, connections of hosts that have vanished would stay for ever.
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * HEARTBEAT_S))
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * GONE_S))
        if sealed is not None:
            sealed.guard(self._context, self.socket)
        self._incoming = BoundedMessages(self.socket)
        try:
            bind(self.socket, host, port)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, max_frames: int) -> list[zmq.Frame] | None:
        """The next message's frames, one more than `max_frames` if there are too many; None if none waits."""
        frames: list[zmq.Frame] = []
        while True:
            try:
                frame = self._incoming.receive()
            except zmq.Again:
                return None
            if len(frames) <= max_frames:
                frames.append(frame)
            if not frame.more:
                return frames

    def send(self, identity: bytes, data: bytes) -> None:
        """Never waits; a sender that does not read its replies loses them."""
        try:
            self.socket.send_multipart([identity, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("could not reply to a message: %s", error)

    def close(self) -> None:
        """Close the socket."""
        self._incoming.close()
        self._context.destroy(linger=0)


class _Origin(NamedTuple):
    """The sender of a message, and the channel that seals its ack, if messages are sealed."""

    identity: bytes
    channel: Channel | None = None


class ZmqListener:
    """ZMQ at a receiver. With `seals`, only senders that know the key of its offer get in, and messages are sealed.

    Raises: ConfigError when it cannot listen there.
    """

    def __init__(self, host: str, port: int, *, seals: bool = False) -> None:
        self._sealed: SealedServer | None = None
        if seals:
            from common.security.sealed_sockets import SealedServer

            self._sealed = SealedServer()
        self._router = RouterSocket(host, port, wire.MAX_PAYLOAD_BYTES + OVERHEAD_BYTES, self._sealed)
        key = None if self._sealed is None else self._sealed.public_key
        self.offer = TransportOffer(ZMQ, self._router.endpoint, key=key)

    def attach(self, context: TransportContext) -> None:
        context.poller.register(self._router.socket, zmq.POLLIN)
        if self._sealed is not None:
            context.poller.register(self._sealed.requests, zmq.POLLIN)

    def on_poll(self, ready: Ready, now: float) -> None:
        if self._sealed is not None:
            self._sealed.admit()

    def receive(self) -> Arrival | None:
        while frames := self._router.receive(3):
            try:
                return self._arrival(frames)
            except ProtocolError as error:
                log.warning("dropped a data message: %s", error, extra={"peer": repr(frames[0].bytes)})
        return None

    def _arrival(self, frames: list[zmq.Frame]) -> Arrival:
        """Raises: ProtocolError."""
        if len(frames) != 3:
            raise ProtocolError(f"it has {len(frames) - 1} frames instead of 2")
        identity, header, payload = frames
        if self._sealed is None:
            return Arrival(header.buffer, np.frombuffer(payload.buffer, dtype=np.uint8), _Origin(identity.bytes))
        content, channel = self._sealed.open_header(identity.bytes, header.bytes)
        opened = payload.buffer[: max(0, len(payload) - OVERHEAD_BYTES)]
        channel.open_into(payload.buffer, opened, context=header.bytes)
        return Arrival(content, np.frombuffer(opened, dtype=np.uint8), _Origin(identity.bytes, channel))

    def acknowledge(self, arrival: Arrival, ack: wire.SliceAck | None) -> None:
        identity, channel = arrival.origin
        if ack is not None:
            data = wire.encode(ack)
            self._router.send(identity, data if channel is None else channel.seal(data))

    def close(self) -> None:
        self._router.close()
