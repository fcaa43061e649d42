"""Control links, which exchange typed messages over TCP. A node's leader binds one `Server`; a router or a prefill leader
that uses the node opens one `Link` to it. Both ends send and receive.

A frame is its length in four bytes and an array of messages. All messages that one turn of the loop sends to a node are in
one frame. Before the first message both ends agree on a protocol version (`common.control.handshake`).

Runs on the asyncio loop of the process. A link belongs to one incarnation of the node behind it. When the connection
breaks, the link is lost for good, `on_lost` is called once, and the owner opens a new link if membership still lists the
node. A dead connection (a cut cable) counts as broken after `frames.SILENCE_S`; leases (`Ping` and `Pong`) also find
processes that hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from common.base.endpoints import endpoint, tcp_place
from common.base.errors import ConfigError, ProtocolError, Unavailable
from common.base.resolve import NameUnknown, resolve
from common.control.codec import MAX_MESSAGES, check, decode, encode, join, split
from common.control.connection_limits import ConnectionLimits
from common.control.frames import QUEUE_BYTES, FrameConnection
from common.control.handshake import GREETING, server_versions, versions_frame, versions_in
from common.control.messages import Message
from common.control.tls_listener import TlsListener
from common.control.versions import OLDEST_VERSION, OURS, PROTOCOL_VERSION, Versions
from common.security.names import host_of
from common.security.tls import Credentials, why_refused

log = logging.getLogger(__name__)

Identity = bytes
"""Identifies one connected `Link` at the `Server`, as long as the link exists."""

_JOINED_BYTES = 8192
"""Maximum size of a frame of joined messages, because the other end limits the items of a larger frame."""

_CONNECT_TIMEOUT_S, _RETRY_S = 2.0, 0.1
"""Time limit of one attempt to connect, which allows two of TCP's, and pause before the next. TCP's intervals grow."""
_GREETING_S = 30.0
"""Time limit for the server's first frame."""

_MAX_MALFORMED = 10
"""Malformed frames after which a connection is closed."""
_CLIENTS = ("router", "node")
"""Roles that connect to a `Server`."""


class Server:
    """The control socket of a node's leader.

    `on_message(identity, message)` runs on the loop for every well-formed message; malformed ones are logged and
    dropped. With `credentials`, only routers and nodes that show a certificate of the same authority are accepted.

    Raises: ConfigError if `host`:`port` cannot be bound. Port 0 picks a free one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        on_message: Callable[[Identity, Message], None],
        credentials: Credentials | None = None,
    ) -> None:
        self._on_message = on_message
        self._connections: dict[Identity, FrameConnection] = {}
        self._names = itertools.count(1)
        self._limits = ConnectionLimits(self._connections, self._drop)
        try:
            listener = socket.create_server((host, port), family=_family(host), backlog=1024)
        except (OSError, TypeError) as error:  # TypeError: not a valid host name
            raise ConfigError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from error
        address, port = listener.getsockname()[:2]
        self.address: str = endpoint("tcp", address, port)
        self._secured, self._plain = None, None
        if credentials is None:
            loop = asyncio.get_running_loop()
            self._plain = loop.create_task(loop.create_server(self._accept, sock=listener))
        else:
            self._secured = TlsListener(listener, self._accept, credentials.for_server)

    def send(self, identity: Identity, message: Message) -> None:
        """Send without waiting. A link whose queue is full is closed, because its other end must learn that it missed messages.

        Raises: Unavailable if that link is gone; ProtocolError if the message cannot be encoded.
        """
        connection = self._connections.get(identity)
        if connection is None:
            raise Unavailable("cannot send: the link is gone")
        if connection.is_full:
            connection.abort()
            self._drop(identity, "its other end does not read, and its queue is full")
            raise Unavailable("cannot send: the link is full")
        connection.send(join([encode(message, connection.version or OLDEST_VERSION)]))

    def send_directly(self, identity: Identity, message: Message) -> bool:
        """Send on the calling thread, which may be any, without waking the loop. Returns False, and sends nothing, if the link
        is gone or uses TLS, its other end reads slowly, or the message cannot be encoded; call `send` then.
        """
        connection = self._connections.get(identity)
        if connection is None:
            return False
        try:
            return connection.send_directly(join([encode(message, connection.version or OLDEST_VERSION)]))
        except ProtocolError:
            return False

    def is_connected(self, identity: Identity) -> bool:
        """Whether this link still exists; a link that is gone does not come back."""
        return identity in self._connections

    async def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._limits.close()
        if self._secured is not None:
            self._secured.close()
            await self._secured.wait_closed()
        if self._plain is not None:
            (await self._plain).close()

    def _accept(self) -> FrameConnection:
        identity = b"%d" % next(self._names)

        def opened(connection: FrameConnection) -> None:
            if not self._limits.may_open():
                connection.close()
                return
            if not connection.may_be(_CLIENTS):
                _warn(connection, "closed a control connection: its certificate names neither a router nor a node")
                connection.close()
                return
            self._connections[identity] = connection
            connection.enable_direct_sends()
            connection.send(GREETING)

        def ended(reason: str) -> None:
            connection = self._connections.pop(identity)
            if not reason.startswith("broke"):
                _warn(connection, "closed a control connection: its other end %s", reason)

        return FrameConnection(lambda frame: self._receive(identity, frame), ended, opened, self._limits.grew)

    def _drop(self, identity: Identity, why: str) -> None:
        connection = self._connections.pop(identity)
        _warn(connection, "closed a control connection: %s", why)
        connection.close()

    def _receive(self, identity: Identity, frame: bytes | bytearray) -> None:
        """Handle a frame's messages up to the first malformed one. After several malformed frames close the connection."""
        try:
            for envelope in split(frame):
                theirs = versions_in(envelope)
                if theirs is None:
                    self._handle(identity, check(envelope))
                else:
                    self._agree(identity, theirs)
        except ProtocolError as error:
            connection = self._connections.get(identity)
            if connection is None:
                return
            connection.malformed_frames += 1
            is_last = connection.malformed_frames == _MAX_MALFORMED
            end = " and closed their connection" if is_last else ""
            _warn(connection, "dropped control messages%s: %s", end, error)
            if is_last:
                self._connections.pop(identity).close()

    def _agree(self, identity: Identity, theirs: Versions) -> None:
        """Answer with our versions, and use the newest common one. Without one, close the connection."""
        connection = self._connections.get(identity)
        if connection is None or connection.version:
            raise ProtocolError("protocol versions came twice")
        connection.send(versions_frame())
        try:
            connection.version = OURS.common(theirs)
        except ProtocolError as error:
            self._drop(identity, error.message)

    def _handle(self, identity: Identity, message: Message) -> None:
        try:
            self._on_message(identity, message)
        except Exception:  # the main loop of a link: a bug in handling one message must not end it
            log.exception("cannot handle a control message")


class Link:
    """A connection to one incarnation's `Server`.

    With `credentials`, the other end must be a node with a certificate of the same authority.

    `on_message(message)` runs on the loop for every well-formed message, `on_lost(reason)` at most once, and neither
    after `close`. The link is also lost if it is not connected after `connect_timeout_s`; None means no limit.

    Raises: Unavailable for a malformed address.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
        *,
        connect_timeout_s: float | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.address = address
        self._credentials = credentials
        self._problem = ""
        """Why the last attempt to connect failed, if TLS or the resolver gave a reason."""
        self._on_message = on_message
        self._on_lost = on_lost
        place = tcp_place(address)
        if place is None:
            raise Unavailable(f"{address} is not the address of a control socket")
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._connection: FrameConnection | None = None
        self._connected = False
        self._deadline: asyncio.TimerHandle | None = None
        if connect_timeout_s is not None:
            self._wait(connect_timeout_s, f"{address} could not be reached within {connect_timeout_s:g} s")
        self._connecting = self._loop.create_task(self._connect(*place))
        self._connecting.add_done_callback(self._stopped_connecting)
        self._unsent: list[bytes] = []
        """Messages sent in this turn of the loop, or before the link is connected."""
        self._due = False
        self._refused: list[bytes] = []
        self.version = PROTOCOL_VERSION
        """The protocol version of what is sent; after the connection, the one that both ends use."""

    def send(self, message: Message) -> None:
        """Send without waiting; messages are queued until the link is connected. All messages of one turn of the loop are sent
        together at its end. If the queue is full, the link is lost.

        Raises: Unavailable if the link is closed; ProtocolError if the message cannot be encoded.
        """
        if self.closed:
            raise Unavailable(f"link to {self.address} is closed")
        if not self._due:
            self._due = True
            self._loop.call_soon(self._flush)
        self._unsent.append(encode(message, self.version))

    @property
    def refused(self) -> list[Message]:
        """Messages that were not sent when the link was lost or closed, because the queue was full. The owner may send them on
        the next link."""
        return [decode(data) for data in self._refused]

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        unsent, self._unsent = self._unsent, []
        try:
            if unsent and self._connected:
                self._send(unsent)
        except Unavailable:
            self._refused = unsent
        if self._deadline is not None:
            self._deadline.cancel()
        self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _connect(self, host: str, port: int) -> None:
        while True:
            secured: dict[str, Any] = {}
            if self._credentials is not None:
                secured = {"ssl": self._credentials.for_client(), "server_hostname": host_of("node")}
            # TimeoutError is an OSError; UnicodeError: not a valid host name
            with contextlib.suppress(OSError, UnicodeError):
                try:
                    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                        address = await resolve(host, _CONNECT_TIMEOUT_S)
                        await self._loop.create_connection(
                            self._new_connection, address, port, family=_family(address), **secured
                        )
                        return
                except (ssl.SSLError, NameUnknown) as error:
                    self._note(why_refused(error))
                    raise
            if self._connection is not None:
                # This process was suspended, so the connect timeout fired just as the connection was made. uvloop then closes
                # the transport without calling `connection_lost`.
                self._connection.abort()
                self._lose(f"connection to {self.address} was made too late")
                return
            await asyncio.sleep(_RETRY_S)

    def _note(self, problem: str) -> None:
        """Log why the link cannot connect, once per reason, because it may retry without end."""
        if self._problem != f": {problem}":
            log.warning("cannot connect to %s, trying again: %s", self.address, problem)
        self._problem = f": {problem}"

    def _stopped_connecting(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("cannot connect to %s", self.address, exc_info=error)
            self._lose(f"cannot connect to {self.address}: {error}")

    def _new_connection(self) -> FrameConnection:
        return FrameConnection(
            self._receive, lambda reason: self._lose(f"connection to {self.address} {reason}"), self._open
        )

    def _open(self, connection: FrameConnection) -> None:
        self._connection = connection
        if self.closed:
            connection.close()
            return
        if connection.reached_itself:
            self._lose(f"connection to {self.address} reached itself")
            return
        if self._deadline is None:
            self._wait(_GREETING_S, f"{self.address} accepted the connection and sent nothing for {_GREETING_S:g} s")

    def _wait(self, timeout_s: float, reason: str) -> None:
        self._deadline = self._loop.call_later(timeout_s, lambda: self._lose(reason + self._problem))

    def _receive(self, frame: bytes | bytearray) -> None:
        try:
            if not self._connected:
                self._agree(server_versions(frame))
                return
            messages = list(map(check, split(frame)))
        except ProtocolError as error:
            self._lose(f"{self.address} does not speak our protocol: {error}")
            return
        for message in messages:
            if self.closed:
                return
            try:
                self._on_message(message)
            except Exception:  # a bug in handling one message must not end the link
                log.exception("cannot handle a control message")

    def _agree(self, theirs: Versions | None) -> None:
        """Say which versions this end speaks, or use the newest that both speak. Raises: ProtocolError if there is none."""
        assert self._connection is not None
        if theirs is None:
            self._connection.send(versions_frame())
            return
        self.version = OURS.common(theirs)
        self._connected = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._unsent = [encode(decode(data), self.version) for data in self._unsent]
        self._flush()

    def _flush(self) -> None:
        self._due = False
        if not self._unsent or not (self._connected or sum(map(len, self._unsent)) > QUEUE_BYTES):
            return
        unsent, self._unsent = self._unsent, []
        try:
            self._send(unsent)
        except Unavailable as error:
            self._refused = unsent
            self._lose(f"connection to {self.address} cannot send: {error}")

    def _send(self, messages: list[bytes]) -> None:
        if self._connection is None or not self._connected:
            raise Unavailable("too many messages are queued for it")
        start = size = 0
        for index, message in enumerate(messages):
            size += len(message)
            if index > start and (size > _JOINED_BYTES or index - start == MAX_MESSAGES):
                self._connection.send(join(messages[start:index]))
                start, size = index, len(message)
        self._connection.send(join(messages[start:]))

    def _lose(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._on_lost(reason)


def _warn(connection: FrameConnection, text: str, *args: object) -> None:
    log.warning(text, *args, extra={"peer": connection.peer})


def _family(host: str) -> socket.AddressFamily:
    """Address family of a host; a name counts as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
