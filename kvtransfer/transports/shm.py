"""KV through shared memory, between two nodes of one user on one host: one copy at each end.

Each pair of ranks has a ring of pages (`kvtransfer.transports.ring`) and a Unix socket. The sender gathers straight into a
free page and says so on the socket; the receiver scatters straight out of it and acknowledges, which frees the page.
The socket tells either side at once when the other is gone. Used by the I/O threads of both ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import zmq

from common.base.errors import ConfigError, PeerLost, ProtocolError
from common.engine.kv_transfer import OnReceiverEvent, OnSenderEvent
from common.kv.layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer import wire
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.transports import ring
from kvtransfer.transports.base import Arrival, Buffer, EndContext, Peer, Ready, fit_message
from kvtransfer.transports.choose import SHM, TransportOffer
from kvtransfer.transports.same_host import host_id

log = logging.getLogger(__name__)

PAGE_BYTES, NUM_PAGES = 4 * 2**20, 4
"""Large, because what happens between two copies costs as much as copying a few hundred KiB."""
_MESSAGE = struct.Struct("<IIQ")
"""Page, bytes of its header, bytes of its payload."""
_CREDENTIALS = struct.Struct("iii")
_MAX_ACK_BYTES = 16 * 2**10
_MAX_CONNECTIONS = 1024
_ACCEPT_PAUSE_S = 1.0
"""After a failed accept (no descriptor left, most likely): senders wait in the backlog meanwhile."""


class ShmPeer(Peer):
    """One connection with a ring of its own. A transport on top of it greets with more, and passes more descriptors.

    Raises: PeerLost if there can be none.
    """

    def __init__(
        self,
        name: str,
        poller: zmq.Poller,
        incarnation: str,
        *,
        num_pages: int,
        page_bytes: int,
        now: float,
        transport: str = SHM,
        greeting: bytes = b"",
        fds: tuple[int, ...] = (),
    ) -> None:
        super().__init__(transport, incarnation, message_bytes=page_bytes, window=num_pages, now=now)
        self._poller = poller
        self._broken = ""
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise PeerLost(f"no socket for {name!r}: {error}") from error
        try:
            self._socket.connect("\0" + name)
            if (uid := _user_of(self._socket)) != os.geteuid():
                raise PermissionError(f"it belongs to user {uid}")
            self._ring, fd, of_ring = ring.create(num_pages, page_bytes)
            try:
                socket.send_fds(self._socket, [of_ring + greeting], [fd, *fds])
            finally:
                os.close(fd)
        except OSError as error:
            self._socket.close()
            raise PeerLost(f"cannot share memory with {name!r}: {error}") from error
        self._free_pages = list(range(num_pages))
        """The last freed is taken first: it is still in some cache."""
        self._page_of: dict[int, int] = {}
        """Pages in use, by the identity of the buffer that shows them."""
        poller.register(self._socket.fileno(), zmq.POLLIN)

    def stage(self) -> Buffer:
        """As `Peer.stage`: a page of the ring."""
        page = self._free_pages.pop()
        buffer = self._ring.payload(page, self._ring.page_bytes)
        self._page_of[id(buffer)] = page
        return buffer

    def _put(self, header: bytes, buffer: Buffer, size_bytes: int) -> None:
        page = self._page_of[id(buffer)]
        self._ring.header(page, len(header))[:] = np.frombuffer(header, dtype=np.uint8)
        try:
            self._socket.send(_MESSAGE.pack(page, len(header), size_bytes))
        except OSError as error:
            self._broken = self._broken or str(error)

    def _replies(self, ready: Ready, now: float) -> Iterator[bytes]:
        while self._socket.fileno() in ready and not self._broken:
            try:
                data = self._socket.recv(_MAX_ACK_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self._broken = str(error)
                break
            if data:
                yield data
            else:
                self._broken = "the other end has closed it"
        if self._broken:
            raise PeerLost(self._broken)

    def _free(self, buffer: Buffer) -> None:
        self._free_pages.append(self._page_of.pop(id(buffer)))

    def _close(self) -> None:
        self._poller.unregister(self._socket.fileno())
        self._socket.close()
        self._page_of.clear()
        del self._ring


class ShmConnector:
    """Shared memory at a sender. `page_bytes` is the most that one message carries (raised to the size of one block of
    one layer where that is more), `num_pages` how many messages a peer may have unacknowledged.

    Raises: ConfigError where memory cannot be shared this way.
    """

    def __init__(self, *, page_bytes: int = PAGE_BYTES, num_pages: int = NUM_PAGES) -> None:
        self._page_bytes = page_bytes
        self._num_pages = num_pages
        self.offer = TransportOffer(SHM, host_id=required_host_id())

    def attach(self, context: EndContext) -> None:
        """As `Connector.attach`. Raises: ConfigError."""
        self._poller = context.poller
        self._page_bytes = fit_message(self._page_bytes, context.unit_bytes)

    def connect(self, offer: TransportOffer, incarnation: str, now: float) -> ShmPeer:
        """As `Connector.connect`. Raises: PeerLost."""
        name = offer.endpoint.rpartition("/")[2]
        return ShmPeer(name, self._poller, incarnation, num_pages=self._num_pages, page_bytes=self._page_bytes, now=now)

    def close(self) -> None:
        """As `Connector.close`."""


class Connection:
    """One sender at a receiver. Its ring is known once the greeting has come."""

    greeting_bytes, num_fds = ring.GREETING_BYTES, 1

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.ring: ring.Ring | None = None

    def greet(self) -> None:
        """Take the greeting and its descriptors. Raises: OSError, ProtocolError."""
        data, fds, _, _ = socket.recv_fds(self.socket, self.greeting_bytes, self.num_fds)
        try:
            if len(fds) != self.num_fds:
                raise ProtocolError("a greeting without memory" if data else "closed before its greeting")
            self.ring = self.accept(data, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def accept(self, greeting: bytes, fds: list[int]) -> ring.Ring:
        """The ring of a greeting. Raises: OSError, ProtocolError."""
        return ring.accept(greeting, fds[0])

    def forget(self) -> None:
        """Let go of the memory, which is unmapped when the last view of it is gone."""
        self.ring = None

    def take(self, shared: ring.Ring) -> Arrival | None:
        """The next message; None if the other end has closed. Raises: OSError, ProtocolError."""
        data = self.socket.recv(_MESSAGE.size)
        if not data:
            return None
        if len(data) != _MESSAGE.size:
            raise ProtocolError(f"a message of {len(data)} bytes")
        page, header_bytes, payload_bytes = _MESSAGE.unpack(data)
        if page >= shared.num_pages or header_bytes > wire.MAX_HEADER_BYTES or not payload_bytes:
            raise ProtocolError(f"page {page} with {header_bytes} + {payload_bytes} bytes is not in the ring")
        # Copied before it is checked: the other end could still write there.
        return self.arrival(shared, page, shared.header(page, header_bytes).tobytes(), payload_bytes)

    def arrival(self, shared: ring.Ring, page: int, header: bytes, payload_bytes: int) -> Arrival:
        """A message whose header is as given. Raises: ProtocolError."""
        if payload_bytes > shared.page_bytes:
            raise ProtocolError(f"page {page} with {payload_bytes} bytes is not in the ring")
        return Arrival(header, shared.payload(page, payload_bytes), self)


class ShmListener:
    """Shared memory at a receiver: a Unix socket with a random abstract name, for processes of our own user only.

    `connection` makes the connections of a transport on top of it. Raises: ConfigError where memory cannot be shared
    this way.
    """

    def __init__(
        self, transport: str = SHM, card: str = "", connection: Callable[[socket.socket], Connection] = Connection
    ) -> None:
        name = f"kvrelay-{secrets.token_hex(16)}"
        host = required_host_id()
        self.offer = TransportOffer(transport, f"unix://{host}/{name}", host, card)
        self.malformed_messages = 0
        self._connect = connection
        self._connections: dict[int, Connection] = {}
        self._readable: deque[Connection] = deque()
        self._accept_again_s: float | None = None
        """Set while the listening socket is not polled: it would stay readable, and the thread would spin."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + name)
        self._socket.listen(128)

    def attach(self, context: EndContext) -> None:
        """As `Listener.attach`."""
        self._poller = context.poller
        self._poller.register(self._socket.fileno(), zmq.POLLIN)

    def note(self, ready: Ready, now: float) -> None:
        """As `Listener.note`."""
        if self._accept_again_s is not None and now >= self._accept_again_s:
            self._accept_again_s = None
            self._poller.register(self._socket.fileno(), zmq.POLLIN)
            self._accept(now)
        elif self._socket.fileno() in ready:
            self._accept(now)
        known = set(self._readable)
        self._readable.extend(c for fd, c in self._connections.items() if fd in ready and c not in known)

    def receive(self) -> Arrival | None:
        """As `Listener.receive`; connections take turns."""
        while self._readable:
            connection = self._readable.popleft()
            arrival = self._read(connection)
            if arrival is not None:
                self._readable.append(connection)
                return arrival
        return None

    def acknowledge(self, arrival: Arrival, ack: wire.SliceAck | None) -> None:
        """As `Listener.acknowledge`."""
        connection: Connection = arrival.origin
        if ack is None:
            self._malformed(connection, "its header cannot be read")
            return
        try:
            connection.socket.send(wire.encode(ack))
        except OSError as error:
            self._drop(connection, str(error))

    def close(self) -> None:
        """As `Listener.close`."""
        for connection in list(self._connections.values()):
            self._drop(connection, "closed by us")
        self._socket.close()

    def _read(self, connection: Connection) -> Arrival | None:
        """One message; None if none waits now, or none will ever come again."""
        try:
            if connection.ring is None:
                connection.greet()
            if connection.ring is not None and (arrival := connection.take(connection.ring)) is not None:
                return arrival
            self._drop(connection, "closed by the sender")
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(connection, str(error))
        except ProtocolError as error:
            self._malformed(connection, error.message)
        return None

    def _accept(self, now: float) -> None:
        try:
            while True:
                connected, _ = self._socket.accept()
                connected.setblocking(False)
                uid = _user_of(connected)
                if uid != os.geteuid() or len(self._connections) >= _MAX_CONNECTIONS:
                    log.warning("refused a sender of user %d, %d are connected", uid, len(self._connections))
                    connected.close()
                    continue
                self._connections[connected.fileno()] = self._connect(connected)
                self._poller.register(connected.fileno(), zmq.POLLIN)
        except BlockingIOError:
            pass
        except OSError as error:
            log.warning("cannot take senders on this host, tries again in %g s: %s", _ACCEPT_PAUSE_S, error)
            self._poller.unregister(self._socket.fileno())
            self._accept_again_s = now + _ACCEPT_PAUSE_S

    def _malformed(self, connection: Connection, reason: str) -> None:
        self.malformed_messages += 1
        log.warning("a sender on this host speaks nonsense: %s", reason)
        self._drop(connection, reason)

    def _drop(self, connection: Connection, reason: str) -> None:
        """Close a connection and let go of its memory. No transfer fails: its slices may come again another way."""
        if self._connections.pop(connection.socket.fileno(), None) is None:
            return
        log.debug("dropped a connection: %s", reason)
        self._poller.unregister(connection.socket.fileno())
        connection.socket.close()
        connection.forget()
        with suppress(ValueError):
            self._readable.remove(connection)


def _user_of(connected: socket.socket) -> int:
    """Who is at the other end: anybody on this host may take an abstract name that nobody has. Raises: OSError."""
    return _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]


def required_host_id() -> str:
    """Of this host. Raises: ConfigError where memory cannot be shared."""
    host = host_id()
    if host is None:
        raise ConfigError("shared memory needs Linux with memfd and /proc")
    return host


class ShmSender(Sender):
    """`KVSender` over shared memory alone; options as of `ShmConnector` and `Sender`. Raises: ConfigError."""

    def __init__(
        self,
        storage: KVStorage,
        layout: KVLayout,
        rank: int,
        on_event: OnSenderEvent,
        *,
        page_bytes: int = PAGE_BYTES,
        num_pages: int = NUM_PAGES,
        **options: Any,
    ) -> None:
        connector = ShmConnector(page_bytes=page_bytes, num_pages=num_pages)
        super().__init__(storage, layout, rank, on_event, [connector], **options)


class ShmReceiver(Receiver):
    """`KVReceiver` over shared memory alone. Raises: ConfigError."""

    def __init__(
        self, storage: KVStorage, layout: KVLayout, rank: int, on_event: OnReceiverEvent, **options: Any
    ) -> None:
        super().__init__(storage, layout, rank, on_event, [ShmListener()], **options)
