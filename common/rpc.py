"""Control links: typed messages over ZMQ. A node's leader binds one `Server`; whoever wants something
of that node (a router, a prefill leader) opens one `Link` to it. Both ends talk both ways.

A frame is an array of messages: all that one turn of the loop sends goes out together.

Runs on the asyncio loop of the process. A link belongs to one incarnation of the node behind it: when
the connection breaks it is over for good, `on_lost` says so once, and its owner opens a new one
if membership still lists the node. A connection that stands but carries nothing any more (a cut cable, a stopped
machine) counts as broken after `SILENCE_S`, by ZMQ's own heartbeats; shorter leases are `Ping`'s and `Pong`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from common.errors import ConfigError, ProtocolError, Unavailable
from common.protocol import MAX_MESSAGE_BYTES, Message, check, decode, encode, join, split

log = logging.getLogger(__name__)

Identity = bytes
"""Names one connected `Link` at the `Server`; valid as long as that link lives."""

_QUEUE_MESSAGES = 10_000
"""Messages, of whole turns, that may wait for a slow peer before sending to it fails."""

_JOINED_BYTES = 2**20
"""Messages that are larger together have a frame each, so that no frame gets too large for the other end."""

SILENCE_S = 5.0
"""So long both ends of a connection wait for a sign of life, which each gets every second."""

_HEARTBEAT_MS = 1000

CONNECT_TIMEOUT_MS = 2000
"""After so long ZMQ begins to connect anew. TCP's own attempts, of which this leaves room for two, come further and further
apart: it would be late by as much again as the other end was away."""


_MAX_SOCKETS = 65_535
"""ZMQ's own bound is 1,023, which a router has used up at 341 nodes: three for every link."""

_FRAMES_PER_TURN = 32
"""So many frames are taken before everything else on the loop has its turn."""

_POLLIN = int(zmq.POLLIN)
_Socket = zmq.Socket[bytes]


class _Inbox:
    """Hands over all that arrives at a socket, on the loop. Without a future or a task per message: a router's whole
    throughput passes here. `on_frames` may close the inbox.
    """

    def __init__(self, socket: _Socket, on_frames: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._closed = False
        self._due = False
        self._loop.add_reader(self._fd, self._read)
        self.wake()

    def wake(self) -> None:
        """Read soon what is there. The descriptor only tells of changes, and whoever uses the socket may have taken that
        from us.
        """
        if not self._due and not self._closed and self._readable():
            self._due = True
            self._loop.call_soon(self._read)

    def _readable(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def close(self) -> None:
        """To be called before the socket is closed."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)

    def _read(self) -> None:
        self._due = False
        for _ in range(_FRAMES_PER_TURN):
            if self._closed or not self._readable():
                return
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._on_frames(frames)
        self.wake()


def _open(kind: int) -> _Socket:
    context = cast("zmq.Context[_Socket]", zmq.Context.instance())
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)  # has its effect with the first socket
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _QUEUE_MESSAGES)
    return socket


class Server:
    """The control socket of a node's leader.

    `on_message(identity, message)` runs on the loop for every well-formed message; what is malformed is
    logged and dropped, the node goes on.

    Raises: ConfigError when `host`:`port` cannot be bound. Port 0 takes any free one.
    """

    def __init__(self, host: str, port: int, on_message: Callable[[Identity, Message], None]) -> None:
        self._on_message = on_message
        self._socket = _open(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._inbox = _Inbox(self._socket, self._receive)

    def send(self, identity: Identity, message: Message) -> None:
        """Send without waiting.

        Raises: Unavailable if that link is gone or its queue is full.
        """
        _send(self._socket, [identity, join([encode(message)])], self._inbox)

    async def close(self) -> None:
        self._inbox.close()
        self._socket.close()

    def _receive(self, frames: list[bytes]) -> None:
        for frame in frames[1:]:
            try:
                envelopes = split(frame)
            except ProtocolError as error:
                log.warning("dropped control messages: %s", error)
                continue
            for envelope in envelopes:
                self._take(frames[0], envelope)

    def _take(self, identity: Identity, envelope: object) -> None:
        try:
            message = check(envelope)
        except ProtocolError as error:
            log.warning("dropped a control message: %s", error)
            return
        try:
            self._on_message(identity, message)
        except Exception:  # the main loop of a link: one message's bug must not end it
            log.exception("a control message was not taken")


class Link:
    """A connection to one incarnation's `Server`.

    `on_message(message)` runs on the loop for every well-formed message; `on_lost(reason)` at most once.
    Not called any more after `close`. A connection that does not stand after `connect_timeout_s` is lost, too;
    with None it is tried for ever.

    Raises: Unavailable for an address that no socket takes, and where no socket is to be had.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
        *,
        connect_timeout_s: float | None = None,
    ) -> None:
        self.address = address
        self._on_message = on_message
        self._on_lost = on_lost
        try:
            self._socket = _open(zmq.DEALER)
        except zmq.ZMQError as error:
            raise Unavailable(f"cannot open a socket for {address}: {error}") from error
        self._socket.setsockopt(zmq.IMMEDIATE, 0)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * SILENCE_S))
        self._socket.setsockopt(zmq.HEARTBEAT_TTL, int(1000 * SILENCE_S))  # for the other end to judge us by
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        monitor: _Socket | None = None
        try:
            monitor = self._socket.get_monitor_socket(events)
            self._socket.connect(address)
        except zmq.ZMQError as error:
            if monitor is not None:
                self._socket.disable_monitor()
                monitor.close(linger=0)
            self._socket.close()
            raise Unavailable(f"cannot connect to {address}: {error}") from error
        self._monitor = monitor
        self.closed = False
        self._stands = False
        self._deadline: asyncio.TimerHandle | None = None
        if connect_timeout_s is not None:
            unreached = f"{address} could not be reached within {connect_timeout_s:g} s"
            self._deadline = asyncio.get_running_loop().call_later(connect_timeout_s, self._lose, unreached)
        self._inbox = _Inbox(self._socket, self._receive)
        self._events = _Inbox(self._monitor, self._on_event)
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes] = []
        """What this turn of the loop has sent so far."""
        self._refused: list[bytes] = []

    def send(self, message: Message) -> None:
        """Send without waiting; before the connection stands, messages wait in its queue. All that one turn of the
        loop sends goes out at its end, together: waking ZMQ's thread costs more than a message. A full queue is a loss.

        Raises: Unavailable if the link is closed.
        """
        if self.closed:
            raise Unavailable(f"link to {self.address} is closed")
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(encode(message))

    @property
    def refused(self) -> list[Message]:
        """Once it is closed over a full queue: what its last turn sent in vain. Its owner may owe that to the next link."""
        return [decode(data) for data in self._refused]

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not unsent:
            return
        try:
            _send(self._socket, _frames(unsent), self._inbox)
        except Unavailable as error:
            self._refused = unsent
            self._lose(f"connection to {self.address} takes no more: {error}")

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        unsent, self._unsent = self._unsent, []
        try:
            if unsent:
                _send(self._socket, _frames(unsent), self._inbox)
        except Unavailable:
            self._refused = unsent
        if self._deadline is not None:
            self._deadline.cancel()
        self._inbox.close()
        self._events.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def _receive(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"a node's message has 1 frame, this one has {len(frames)}")
            messages = list(map(check, split(frames[0])))
        except ProtocolError as error:
            self._lose(f"{self.address} does not speak our protocol: {error}")
            return
        for message in messages:
            if self.closed:
                return
            try:
                self._on_message(message)
            except Exception:  # as above
                log.exception("a control message was not taken")

    def _on_event(self, frames: list[bytes]) -> None:
        """The connection stands, or (everything else) it stands no more."""
        if not self._stands and parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._stands = True
            if self._deadline is not None:
                self._deadline.cancel()
        else:
            self._lose(f"connection to {self.address} broke")

    def _lose(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._on_lost(reason)


def _frames(messages: list[bytes]) -> list[bytes]:
    if sum(map(len, messages)) <= _JOINED_BYTES:
        return [join(messages)]
    return [join([message]) for message in messages]


def _send(socket: _Socket, frames: list[bytes], inbox: _Inbox) -> None:
    try:
        if len(frames) == 1:
            socket.send(frames[0], zmq.DONTWAIT)
        else:
            socket.send_multipart(frames, zmq.DONTWAIT)
    except zmq.ZMQError as error:
        raise Unavailable(f"cannot send: {error}") from error
    finally:
        inbox.wake()  # what fails has taken the descriptor's news, too
