"""Shared memory at a sender: each connection has a ring of pages of its own. Used by the sender's I/O thread."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import numpy as np
import zmq

from common.base.errors import PeerLost
from kvtransfer.transports.base import Buffer, Peer, Ready, TransportContext, fit_message
from kvtransfer.transports.choose import SHM, TransportOffer
from kvtransfer.transports.same_host import require_host_id, user_of_peer
from kvtransfer.transports.shm import ring

PAGE_BYTES, NUM_PAGES = 4 * 2**20, 4
"""Large pages, because the work between two copies costs as much as copying a few hundred KiB."""
_MAX_ACK_BYTES = 16 * 2**10


class ShmPeer(Peer):
    """One connection with its own ring. A transport built on it may extend the greeting and pass more descriptors.

    Raises: PeerLost if the connection cannot be made.
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
            if (uid := user_of_peer(self._socket)) != os.geteuid():
                raise PermissionError(f"it belongs to user {uid}")
            self._ring, fd, ring_greeting = ring.create(num_pages, page_bytes)
            try:
                socket.send_fds(self._socket, [ring_greeting + greeting], [fd, *fds])
            finally:
                os.close(fd)
        except OSError as error:
            self._socket.close()
            raise PeerLost(f"cannot share memory with {name!r}: {error}") from error
        self._free_pages = list(range(num_pages))
        """The page freed last is taken first, because it may still be in a processor cache."""
        self._page_of: dict[int, int] = {}
        """Pages in use, by the identity of the buffer that shows them."""
        poller.register(self._socket.fileno(), zmq.POLLIN)

    def stage(self) -> Buffer:
        page = self._free_pages.pop()
        buffer = self._ring.payload(page, self._ring.page_bytes)
        self._page_of[id(buffer)] = page
        return buffer

    def _put(self, header: bytes, buffer: Buffer, size_bytes: int) -> None:
        page = self._page_of[id(buffer)]
        self._ring.header(page, len(header))[:] = np.frombuffer(header, dtype=np.uint8)
        try:
            self._socket.send(ring.PAGE_MESSAGE.pack(page, len(header), size_bytes))
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
                self._broken = "the receiver closed the connection"
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
    """Shared memory at a sender. `page_bytes` is the maximum size of a message (raised to the size of one block of one
    layer where that is more), `num_pages` the maximum number of unacknowledged messages per peer.

    Raises: ConfigError where memory cannot be shared this way.
    """

    def __init__(self, *, page_bytes: int = PAGE_BYTES, num_pages: int = NUM_PAGES) -> None:
        self._page_bytes = page_bytes
        self._num_pages = num_pages
        self.offer = TransportOffer(SHM, host_id=require_host_id())

    def attach(self, context: TransportContext) -> None:
        self._poller = context.poller
        self._page_bytes = fit_message(self._page_bytes, context.unit_bytes)

    def connect(self, offer: TransportOffer, incarnation: str, now: float) -> ShmPeer:
        name = offer.endpoint.rpartition("/")[2]
        return ShmPeer(name, self._poller, incarnation, num_pages=self._num_pages, page_bytes=self._page_bytes, now=now)

    def close(self) -> None:
        pass  # the peers own all sockets and memory
