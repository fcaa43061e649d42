"""The CUDA IPC transport, between two nodes of one user on one host: the receiver copies from GPU memory to GPU memory.

The sender passes a descriptor of its KV memory over a Unix socket and *lends* blocks instead of sending them: a message
says which of its blocks hold final KV. The receiver copies them directly into its own blocks, on a stream of its own, and
acknowledges, which ends the loan. Nothing on a GPU waits for the other process, so a dead process stops no other.
Sockets and pages are those of `kvtransfer.transports.shm`; a page holds no KV but a loan:

    page i:  [ header | valid, first block, number of blocks, ids of blocks ]

A sender that takes its blocks back clears `valid`; the receiver checks it after its copy, and discards the copy if it
was cleared. Decision: docs/decisions/0005-the-receiver-copies-lent-blocks.md.
Used by the I/O threads of senders and receivers.
"""

from __future__ import annotations

import os
import socket
import struct
from functools import partial

import numpy as np
import zmq

from common.base.errors import PeerLost, ProtocolError
from common.base.hashing import HASH_BYTES
from common.kv.storage import KVStorage
from kvtransfer import wire
from kvtransfer.copy.device import LentBlocks, Pages, RelayDevice, pages_of
from kvtransfer.transfer_state import Batch
from kvtransfer.transports.base import Arrival, Buffer, TransportContext
from kvtransfer.transports.choose import CUDA_IPC, TransportOffer
from kvtransfer.transports.same_host import require_host_id
from kvtransfer.transports.shm import ring
from kvtransfer.transports.shm.connector import ShmPeer
from kvtransfer.transports.shm.listener import RingSender, ShmListener

MESSAGE_BYTES, WINDOW = 2**30, 16
"""Messages hold no KV, so they may be large: a GPU copies 1 GiB in the time that two processes need for a few messages.
The window bounds the delay of an abort to some milliseconds."""
_LOAN_WORDS = 3
_MAX_PAGES_BYTES = 2**50
_MAX_BLOCKS = wire.MAX_HEADER_BYTES // HASH_BYTES
_LOAN_BYTES = 8 * (_LOAN_WORDS + _MAX_BLOCKS)
_PAGES = struct.Struct("<6Q")
"""The fields of `Pages` behind its `base`."""


class CudaIpcPeer(ShmPeer):
    """One connection that lends the blocks of `pages`. Raises: PeerLost if there can be none."""

    def __init__(
        self,
        name: str,
        poller: zmq.Poller,
        incarnation: str,
        device: RelayDevice,
        pages: Pages,
        *,
        message_bytes: int,
        window: int,
        now: float,
    ) -> None:
        try:
            fd = device.export()
        except OSError as error:
            raise PeerLost(f"cannot share the memory of {device.card}: {error}") from error
        shape = (pages.layer_lo, pages.layer_hi, pages.head_lo, pages.head_hi, pages.num_blocks, pages.head_bytes)
        try:
            super().__init__(
                name,
                poller,
                incarnation,
                num_pages=window,
                page_bytes=_LOAN_BYTES,
                now=now,
                transport=CUDA_IPC,
                greeting=_PAGES.pack(*shape),
                fds=(fd,),
            )
        finally:
            os.close(fd)
        self.message_bytes = message_bytes
        self._loans: dict[int, np.ndarray] = {}
        """The page of each loan, by message."""

    def lend(self, buffer: Buffer, header: wire.SliceHeader, batch: Batch, blocks: np.ndarray) -> bool:
        """As `Peer.lend`."""
        count = len(header.block_hashes) // HASH_BYTES
        loan = buffer.view(np.int64)
        loan[:_LOAN_WORDS] = 1, header.first_block, count
        loan[_LOAN_WORDS : _LOAN_WORDS + count] = blocks[header.first_block : header.first_block + count]
        self._loans[header.sequence] = loan
        self.lent[header.sequence] = batch
        return True

    def take_back(self, sequence: int) -> Batch:
        """As `Peer.take_back`."""
        self._loans.pop(sequence)[0] = 0
        return super().take_back(sequence)

    def returned(self, sequence: int) -> Batch | None:
        """As `Peer.returned`."""
        self._loans.pop(sequence, None)
        return super().returned(sequence)

    def _close(self) -> None:
        self._loans.clear()
        super()._close()


class CudaIpcConnector:
    """CUDA IPC at a sender. `message_bytes` is the maximum that one message lends (raised to the size of one block of one
    layer where that is more), `window` the maximum number of unacknowledged messages per peer.

    Raises: ConfigError where descriptors cannot be passed.
    """

    def __init__(
        self, device: RelayDevice, storage: KVStorage, *, message_bytes: int = MESSAGE_BYTES, window: int = WINDOW
    ) -> None:
        self._device = device
        self._pages = pages_of(storage, device)
        self._message_bytes = message_bytes
        self._window = window
        self.offer = TransportOffer(CUDA_IPC, host_id=require_host_id(), gpu_id=device.card)

    def attach(self, context: TransportContext) -> None:
        """As `Connector.attach`."""
        self._poller = context.poller
        self._message_bytes = max(self._message_bytes, context.unit_bytes)

    def connect(self, offer: TransportOffer, incarnation: str, now: float) -> CudaIpcPeer:
        """As `Connector.connect`. Raises: PeerLost."""
        return CudaIpcPeer(
            offer.endpoint.rpartition("/")[2],
            self._poller,
            incarnation,
            self._device,
            self._pages,
            message_bytes=self._message_bytes,
            window=self._window,
            now=now,
        )

    def close(self) -> None:
        """As `Connector.close`."""


class _LendingSender(RingSender):
    """One sender at a receiver. Its pages are mapped once the greeting has come, until the last copy from them."""

    greeting_bytes, num_fds = ring.GREETING_BYTES + _PAGES.size, 2

    def __init__(self, connected: socket.socket, *, device: RelayDevice, head_bytes: int) -> None:
        super().__init__(connected)
        self._device = device
        self._head_bytes = head_bytes
        self._pages: Pages | None = None

    def forget(self) -> None:
        """As `RingSender.forget`. Copies under way hold the pages for as long as they need them."""
        super().forget()
        self._pages = None

    def accept(self, greeting: bytes, fds: list[int]) -> ring.Ring:
        """As `RingSender.accept`."""
        shared = ring.accept(greeting[: ring.GREETING_BYTES], fds[0])
        of_pages = greeting[ring.GREETING_BYTES :]
        if len(of_pages) != _PAGES.size or shared.page_bytes != _LOAN_BYTES:
            raise ProtocolError(f"a greeting of {len(greeting)} bytes with pages of {shared.page_bytes}")
        pages = Pages(None, *_PAGES.unpack(of_pages))
        if pages.head_bytes != self._head_bytes or not 0 < pages.size_bytes < _MAX_PAGES_BYTES:
            raise ProtocolError(f"it lends pages that cannot be: {pages}")
        base = self._device.open(fds[1], pages.size_bytes)
        self._pages = Pages(base, *_PAGES.unpack(of_pages))
        return shared

    def arrival(self, shared: ring.Ring, page: int, header: bytes, payload_bytes: int) -> Arrival:
        """As `RingSender.arrival`."""
        assert self._pages is not None
        loan = shared.payload(page, _LOAN_BYTES).view(np.int64)
        first, count = int(loan[1]), int(loan[2])
        if not (first >= 0 and 0 <= count <= _MAX_BLOCKS and payload_bytes < _MAX_PAGES_BYTES):
            raise ProtocolError(f"a loan of {count} blocks from {first} on, {payload_bytes} bytes")
        # Copied before they are checked, because the sender could still write there.
        ids = loan[_LOAN_WORDS : _LOAN_WORDS + count].copy()
        lent = LentBlocks(self._pages, payload_bytes, first, ids)
        return Arrival(header, lent, self, revoked=lambda: not loan[0])


class CudaIpcListener(ShmListener):
    """CUDA IPC at a receiver. Raises: ConfigError where descriptors cannot be passed."""

    def __init__(self, device: RelayDevice, storage: KVStorage) -> None:
        head_bytes = storage.layout.slice_bytes_per_block // 2
        super().__init__(CUDA_IPC, device.card, partial(_LendingSender, device=device, head_bytes=head_bytes))
