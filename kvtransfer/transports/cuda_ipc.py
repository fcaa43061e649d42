"""The CUDA IPC transport, between two nodes of one user on one host: the receiver copies from GPU memory to GPU memory.

The sender passes a descriptor of its KV memory over a Unix socket and *lends* blocks instead of sending them: a message
says which of its blocks hold final KV. The receiver copies them directly into its own blocks, on a stream of its own, and
acknowledges, which ends the loan. Nothing on a GPU waits for the other process, so a dead process stops no other.
Sockets and pages are those of `kvtransfer.transports.shm`; a page holds no KV but a loan:

    page i:  [ header | valid, first block, number of blocks, ids of blocks by block table ]

A sender that takes its blocks back clears `valid`; the receiver checks it after its copy, and discards the copy if it
was cleared. Decision: docs/decisions/0005-the-receiver-copies-lent-blocks.md.
Used by the I/O threads of senders and receivers.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from functools import partial

import numpy as np

from common.base.errors import PeerLost, ProtocolError
from common.base.hashing import HASH_BYTES
from common.kv.memory_layout import GroupMemory, group_memories, rank_bytes
from common.kv.rank_layout import GroupPart
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage
from kvtransfer import wire
from kvtransfer.copy.cuda import CudaDevice
from kvtransfer.copy.device import LentBlocks, RankMemory
from kvtransfer.send_state import Batch
from kvtransfer.transports.base import Arrival, Buffer, TransportContext
from kvtransfer.transports.choose import CUDA_IPC, TransportOffer
from kvtransfer.transports.same_host import require_host_id
from kvtransfer.transports.shm import ring
from kvtransfer.transports.shm.connector import ShmPeer
from kvtransfer.transports.shm.listener import RingSender, ShmListener

MESSAGE_BYTES, WINDOW = 2**30, 16
"""Messages hold no KV, so they may be large: a GPU copies 1 GiB in the time that two processes need for a few messages.
The window bounds the delay of an abort to some milliseconds."""
SAME_GPU_BYTES = 128 * 2**20
"""Minimum size of a message between two processes of one GPU while more will follow. A GPU computes for one process at a
time, so that each copy interrupts the computation of the prompt for about half a millisecond; copying this many bytes
takes less."""
_LOAN_WORDS = 3
_MAX_MEMORY_BYTES = 2**50
_MAX_BLOCKS = wire.MAX_HEADER_BYTES // HASH_BYTES


def _loan_bytes(num_tables: int) -> int:
    """Size of a page: room for the most blocks that one message can name, in each block table."""
    return 8 * (_LOAN_WORDS + _MAX_BLOCKS * num_tables)


def _format(num_groups: int) -> struct.Struct:
    """A sender's memory in its greeting: the number of blocks, then the part of every layer group and its unit_bytes."""
    return struct.Struct(f"<{1 + 5 * num_groups}Q")


def _pack(groups: Sequence[GroupMemory]) -> bytes:
    numbers = [groups[0].num_blocks]
    for part, unit_bytes in ((memory.part, memory.unit_bytes) for memory in groups):
        numbers += [part.layer_lo, part.layer_hi, part.head_lo, part.head_hi, unit_bytes]
    return _format(len(groups)).pack(*numbers)


def _unpack(data: bytes, spec: KVSpec) -> tuple[GroupMemory, ...]:
    """Raises: ProtocolError if no rank with the KV of `spec` can have such a memory."""
    num_blocks, *numbers = _format(len(spec.groups)).unpack(data)
    parts = [GroupPart(i, *numbers[5 * i : 5 * i + 4]) for i in range(len(spec.groups))]
    memories = group_memories(spec, parts, num_blocks)
    fits = all(
        part.layer_lo <= part.layer_hi <= len(group.layers) and part.head_lo < part.head_hi <= group.num_heads
        for part, group in zip(parts, spec.groups, strict=True)
    )
    size_bytes = rank_bytes(memories)
    if not fits or spec.unit_bytes != tuple(numbers[4::5]) or not 0 < size_bytes < _MAX_MEMORY_BYTES:
        raise ProtocolError(f"it lends memory that cannot be: {num_blocks} blocks of {parts}")
    return memories


class CudaIpcPeer(ShmPeer):
    """One connection whose pages name the blocks that it lends. Raises: PeerLost if there can be none."""

    def lend(self, buffer: Buffer, header: wire.SliceHeader, batch: Batch) -> bool:
        count = len(header.block_hashes) // HASH_BYTES
        loan = buffer.view(np.int64)
        loan[:_LOAN_WORDS] = 1, header.first_block, count
        ids = batch.blocks[:, header.first_block : header.first_block + count]
        loan[_LOAN_WORDS : _LOAN_WORDS + ids.size] = ids.reshape(-1)
        self.lent[header.sequence] = batch, loan
        return True

    def revoke(self, sequence: int) -> Batch:
        """Mark the page as taken back; the receiver then discards its copy."""
        self.lent[sequence][1][0] = 0
        return super().revoke(sequence)


class CudaIpcConnector:
    """CUDA IPC at a sender. `message_bytes` is the maximum that one message lends (raised to the size of one block of one
    layer where that is more), `same_gpu_bytes` the minimum to a receiver on the same GPU while more will follow, `window`
    the maximum number of unacknowledged messages per peer.

    Raises: ConfigError where descriptors cannot be passed.
    """

    def __init__(
        self,
        device: CudaDevice,
        storage: KVStorage,
        *,
        message_bytes: int = MESSAGE_BYTES,
        same_gpu_bytes: int = SAME_GPU_BYTES,
        window: int = WINDOW,
    ) -> None:
        self._device = device
        self._memory = RankMemory(device.as_bytes(storage), storage.memories)
        self._num_tables = storage.layout.spec.num_tables
        self._message_bytes = message_bytes
        self._same_gpu_bytes = same_gpu_bytes
        self._window = window
        self.offer = TransportOffer(CUDA_IPC, host_id=require_host_id(), gpu_id=device.gpu_id)

    def attach(self, context: TransportContext) -> None:
        self._poller = context.poller
        self._message_bytes = max(self._message_bytes, context.unit_bytes)

    def connect(self, offer: TransportOffer, incarnation: str, now: float) -> CudaIpcPeer:
        try:
            fd = self._device.export()
        except OSError as error:
            raise PeerLost(f"cannot share the memory of {self._device.gpu_id}: {error}") from error
        try:
            peer = CudaIpcPeer(
                offer.endpoint.rpartition("/")[2],
                self._poller,
                incarnation,
                num_pages=self._window,
                page_bytes=_loan_bytes(self._num_tables),
                now=now,
                transport=CUDA_IPC,
                greeting=_pack(self._memory.groups),
                fds=(fd,),
            )
        finally:
            os.close(fd)
        peer.message_bytes = self._message_bytes
        peer.min_message_bytes = self._same_gpu_bytes if offer.gpu_id == self._device.gpu_id else 0
        return peer

    def close(self) -> None:
        pass  # the peers own all sockets and memory


class _LendingSender(RingSender):
    """One sender at a receiver. Its KV memory is mapped from its greeting until the last copy from it."""

    num_fds = 2

    def __init__(self, connected: socket.socket, *, device: CudaDevice, spec: KVSpec) -> None:
        super().__init__(connected)
        self._device = device
        self._spec = spec
        self.greeting_bytes = ring.GREETING_BYTES + _format(len(spec.groups)).size
        self._memory: RankMemory | None = None

    def forget(self) -> None:
        """Drop the references to ring and KV memory. Copies in progress keep it mapped as long as they need it."""
        super().forget()
        self._memory = None

    def accept(self, greeting: bytes, fds: list[int]) -> ring.Ring:
        """Map the ring and the KV memory of a greeting. Raises: OSError, ProtocolError."""
        shared = ring.accept(greeting[: ring.GREETING_BYTES], fds[0])
        if len(greeting) != self.greeting_bytes or shared.page_bytes != _loan_bytes(self._spec.num_tables):
            raise ProtocolError(f"a greeting of {len(greeting)} bytes with pages of {shared.page_bytes}")
        groups = _unpack(greeting[ring.GREETING_BYTES :], self._spec)
        base = self._device.open(fds[1], RankMemory(None, groups).size_bytes)
        self._memory = RankMemory(base, groups)
        return shared

    def arrival(self, shared: ring.Ring, page: int, header: bytes, payload_bytes: int) -> Arrival:
        """The loan in `page`, as a message with that header. Raises: ProtocolError."""
        assert self._memory is not None
        loan = shared.payload(page, shared.page_bytes).view(np.int64)
        first, count = int(loan[1]), int(loan[2])
        if not (first >= 0 and 0 <= count <= _MAX_BLOCKS and payload_bytes < _MAX_MEMORY_BYTES):
            raise ProtocolError(f"a loan of {count} blocks from {first} on, {payload_bytes} bytes")
        # Copied before they are checked, because the sender could still write there.
        tables = self._spec.num_tables
        ids = loan[_LOAN_WORDS : _LOAN_WORDS + count * tables].copy().reshape(tables, count)
        lent = LentBlocks(self._memory, payload_bytes, first, ids)
        return Arrival(header, lent, self, revoked=lambda: not loan[0])


class CudaIpcListener(ShmListener):
    """CUDA IPC at a receiver. Raises: ConfigError where descriptors cannot be passed."""

    def __init__(self, device: CudaDevice, storage: KVStorage) -> None:
        connect = partial(_LendingSender, device=device, spec=storage.layout.spec)
        super().__init__(CUDA_IPC, device.gpu_id, connect)
