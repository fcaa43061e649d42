"""Shared memory at a receiver: a Unix socket that senders of the same user connect to. Used by the receiver's I/O thread.

Between two nodes of one user on one host, each pair of ranks has a ring of pages (`kvtransfer.transports.shm.ring`) and a
Unix socket. The sender gathers KV into a free page and announces it on the socket; the receiver scatters out of that page
and acknowledges, which frees it: one copy at each end. The socket reports at once when the other process has ended.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq

from common.base.errors import ProtocolError
from kvtransfer import wire
from kvtransfer.transports.base import Arrival, Ready, TransportContext
from kvtransfer.transports.choose import SHM, TransportOffer
from kvtransfer.transports.same_host import require_host_id, user_of_peer
from kvtransfer.transports.shm import ring

log = logging.getLogger(__name__)

_MAX_SENDERS = 1024
_ACCEPT_PAUSE_S = 1.0
"""Pause after a failed accept, most likely for lack of file descriptors: senders wait in the backlog meanwhile."""


class RingSender:
    """One connected sender, as the receiver sees it. `ring` is None until the greeting has arrived."""

    greeting_bytes, num_fds = ring.GREETING_BYTES, 1

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.ring: ring.Ring | None = None

    def greet(self) -> None:
        """Receive the greeting and its descriptors. Raises: OSError, ProtocolError."""
        data, fds, _, _ = socket.recv_fds(self.socket, self.greeting_bytes, self.num_fds)
        try:
            if len(fds) != self.num_fds:
                raise ProtocolError("the greeting has no memory" if data else "closed before its greeting")
            self.ring = self.accept(data, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def accept(self, greeting: bytes, fds: list[int]) -> ring.Ring:
        """Map the ring of a greeting. Raises: OSError, ProtocolError."""
        return ring.accept(greeting, fds[0])

    def forget(self) -> None:
        """Drop the reference to the memory, which is unmapped when its last view is gone."""
        self.ring = None

    def take(self, shared: ring.Ring) -> Arrival | None:
        """The next message; None if the sender closed the connection. Raises: OSError, ProtocolError."""
        data = self.socket.recv(ring.PAGE_MESSAGE.size)
        if not data:
            return None
        if len(data) != ring.PAGE_MESSAGE.size:
            raise ProtocolError(f"a message has {ring.PAGE_MESSAGE.size} bytes, this one has {len(data)}")
        page, header_bytes, payload_bytes = ring.PAGE_MESSAGE.unpack(data)
        if page >= shared.num_pages or header_bytes > wire.MAX_HEADER_BYTES or not payload_bytes:
            raise ProtocolError(f"page {page} with {header_bytes} + {payload_bytes} bytes is not in the ring")
        # Copied before it is checked, because the sender could still write there.
        return self.arrival(shared, page, shared.header(page, header_bytes).tobytes(), payload_bytes)

    def arrival(self, shared: ring.Ring, page: int, header: bytes, payload_bytes: int) -> Arrival:
        """The message in `page` with that header. Raises: ProtocolError."""
        if payload_bytes > shared.page_bytes:
            raise ProtocolError(f"page {page} with {payload_bytes} bytes is not in the ring")
        return Arrival(header, shared.payload(page, payload_bytes), self)


class ShmListener:
    """A Unix socket with a random abstract name, for processes of our own user only.

    `make_sender` lets a transport built on this one handle its connected senders. Raises: ConfigError where memory cannot
    be shared this way.
    """

    def __init__(
        self, transport: str = SHM, gpu_id: str = "", make_sender: Callable[[socket.socket], RingSender] = RingSender
    ) -> None:
        name = f"kvrelay-{secrets.token_hex(16)}"
        host = require_host_id()
        self.offer = TransportOffer(transport, f"unix://{host}/{name}", host, gpu_id)
        self._make_sender = make_sender
        self._senders: dict[int, RingSender] = {}
        """By file descriptor."""
        self._readable: deque[RingSender] = deque()
        self._accept_again_s: float | None = None
        """Set while the listening socket is not polled: it would stay readable, and the thread would spin."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + name)
        self._socket.listen(128)

    def attach(self, context: TransportContext) -> None:
        self._poller = context.poller
        self._poller.register(self._socket.fileno(), zmq.POLLIN)

    def on_poll(self, ready: Ready, now: float) -> None:
        if self._accept_again_s is not None and now >= self._accept_again_s:
            self._accept_again_s = None
            self._poller.register(self._socket.fileno(), zmq.POLLIN)
            self._accept(now)
        elif self._socket.fileno() in ready:
            self._accept(now)
        known = set(self._readable)
        self._readable.extend(s for fd, s in self._senders.items() if fd in ready and s not in known)

    def receive(self) -> Arrival | None:
        """The next message; None if none waits. Senders take turns."""
        while self._readable:
            sender = self._readable.popleft()
            arrival = self._read(sender)
            if arrival is not None:
                self._readable.append(sender)
                return arrival
        return None

    def acknowledge(self, arrival: Arrival, ack: wire.SliceAck | None) -> None:
        """Send the ack, which frees the page. A sender whose header cannot be read is dropped."""
        sender: RingSender = arrival.origin
        if ack is None:
            self._malformed(sender, "its header cannot be read")
            return
        try:
            sender.socket.send(wire.encode(ack))
        except OSError as error:
            self._drop(sender, str(error))

    def close(self) -> None:
        for sender in list(self._senders.values()):
            self._drop(sender, "closed by this receiver")
        self._socket.close()

    def _read(self, sender: RingSender) -> Arrival | None:
        """One message; None if none waits now, or the connection has ended."""
        try:
            if sender.ring is None:
                sender.greet()
            if sender.ring is not None and (arrival := sender.take(sender.ring)) is not None:
                return arrival
            self._drop(sender, "closed by the sender")
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(sender, str(error))
        except ProtocolError as error:
            self._malformed(sender, error.message)
        return None

    def _accept(self, now: float) -> None:
        try:
            while True:
                connected, _ = self._socket.accept()
                connected.setblocking(False)
                uid = user_of_peer(connected)
                if uid != os.geteuid() or len(self._senders) >= _MAX_SENDERS:
                    log.warning(
                        "refused a sender on this host: user %d, %d senders connected (at most %d, of user %d only)",
                        uid,
                        len(self._senders),
                        _MAX_SENDERS,
                        os.geteuid(),
                    )
                    connected.close()
                    continue
                self._senders[connected.fileno()] = self._make_sender(connected)
                self._poller.register(connected.fileno(), zmq.POLLIN)
        except BlockingIOError:
            pass
        except OSError as error:
            log.warning("cannot accept senders on this host, retrying in %g s: %s", _ACCEPT_PAUSE_S, error)
            self._poller.unregister(self._socket.fileno())
            self._accept_again_s = now + _ACCEPT_PAUSE_S

    def _malformed(self, sender: RingSender, reason: str) -> None:
        log.warning("malformed message from a sender on this host: %s", reason)
        self._drop(sender, reason)

    def _drop(self, sender: RingSender, reason: str) -> None:
        """Close a connection and release its memory. No transfer fails: another connection may resend its slices."""
        if self._senders.pop(sender.socket.fileno(), None) is None:
            return
        log.debug("closed the connection of a sender on this host: %s", reason)
        self._poller.unregister(sender.socket.fileno())
        sender.socket.close()
        sender.forget()
        with suppress(ValueError):
            self._readable.remove(sender)
