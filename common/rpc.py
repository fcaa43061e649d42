"""Control links: typed messages over ZMQ. A node's leader binds one `Server`; whoever wants something
of that node (a router, a prefill leader) opens one `Link` to it. Both ends talk both ways.

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
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from common.errors import ConfigError, ProtocolError, Unavailable
from common.protocol import MAX_MESSAGE_BYTES, Message, decode, encode

log = logging.getLogger(__name__)

Identity = bytes
"""Names one connected `Link` at the `Server`; valid as long as that link lives."""

_QUEUE_MESSAGES = 10_000
"""Messages that may wait for a slow peer before sending to it fails."""

SILENCE_S = 5.0
"""So long both ends of a connection wait for a sign of life, which each gets every second."""

_HEARTBEAT_MS = 1000


def _configure(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _QUEUE_MESSAGES)


class Server:
    """The control socket of a node's leader.

    `on_message(identity, message)` runs on the loop for every well-formed message; what is malformed is
    logged and dropped, the node goes on.

    Raises: ConfigError when `host`:`port` cannot be bound. Port 0 takes any free one.
    """

    def __init__(self, host: str, port: int, on_message: Callable[[Identity, Message], None]) -> None:
        self._on_message = on_message
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._task = asyncio.get_running_loop().create_task(self._receive())

    def send(self, identity: Identity, message: Message) -> None:
        """Send without waiting.

        Raises: Unavailable if that link is gone or its queue is full.
        """
        _send(self._socket, [identity, encode(message)])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()

    async def _receive(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"a control message has 1 frame, this one has {len(frames)}")
                message = decode(frames[0])
            except ProtocolError as error:
                log.warning("dropped a control message: %s", error)
                continue
            _guarded(lambda identity=identity, message=message: self._on_message(identity, message))
            await asyncio.sleep(0)  # a flood of messages must not keep everything else off the loop


class Link:
    """A connection to one incarnation's `Server`.

    `on_message(message)` runs on the loop for every well-formed message; `on_lost(reason)` at most once.
    Not called any more after `close`. A connection that does not stand after `connect_timeout_s` is lost, too;
    with None it is tried for ever.

    Raises: Unavailable for an address that no socket takes.
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
        self._connect_timeout_s = connect_timeout_s
        self._on_message = on_message
        self._on_lost = on_lost
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.IMMEDIATE, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * SILENCE_S))
        self._socket.setsockopt(zmq.HEARTBEAT_TTL, int(1000 * SILENCE_S))  # for the other end to judge us by
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
            raise Unavailable(f"cannot connect to {address}: {error}") from error
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._receive()), loop.create_task(self._watch())]
        self.closed = False

    def send(self, message: Message) -> None:
        """Send without waiting; before the connection stands, messages wait in its queue.

        Raises: Unavailable if the link is closed or its queue is full.
        """
        if self.closed:
            raise Unavailable(f"link to {self.address} is closed")
        _send(self._socket, [encode(message)])

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for task in self._tasks:
            task.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"a control message has 1 frame, this one has {len(frames)}")
                message = decode(frames[0])
            except ProtocolError as error:
                self._lose(f"{self.address} does not speak our protocol: {error}")
                return
            _guarded(lambda message=message: self._on_message(message))
            await asyncio.sleep(0)  # as above

    async def _watch(self) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                stands = await self._next_event() == zmq.EVENT_HANDSHAKE_SUCCEEDED
        except TimeoutError:
            self._lose(f"{self.address} could not be reached within {self._connect_timeout_s:g} s")
            return
        if stands:
            await self._next_event()
        self._lose(f"connection to {self.address} broke")

    async def _next_event(self) -> int:
        return parse_monitor_message(await self._monitor.recv_multipart())["event"]

    def _lose(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._on_lost(reason)


def _guarded(deliver: Callable[[], None]) -> None:
    try:
        deliver()
    except Exception:  # the main loop of a link: one message's bug must not end it
        log.exception("a control message was not taken")


def _send(socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    # With DONTWAIT the future is done when the call returns: sent, or failed because it would wait.
    sent = cast("asyncio.Future[None]", socket.send_multipart(frames, zmq.DONTWAIT))  # pyright: ignore[reportUnknownMemberType]
    error = sent.exception()
    if error is not None:
        raise Unavailable(f"cannot send: {error}") from error
