"""Gathering and scattering KV on a device: both copy runs between a rank's blocks and a buffer.

Runs on I/O threads, which only start copies; a `StreamMark` tells when one has ended. KV that another process lends is
copied from its blocks directly into ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.kv.memory_layout import GroupMemory, strips_of
from common.kv.storage import KVStorage
from kvtransfer.copy.cuda import CudaDevice
from kvtransfer.copy.device import CopyRuns, LentBlocks, RankMemory, StreamMark
from kvtransfer.wire import KVSlice


class DeviceCopier:
    """Copies slices of one rank's storage on a device into and out of a connection's buffers, [bytes] of uint8. Buffers that the
    device does not reach are copied by way of pinned memory."""

    def __init__(self, device: CudaDevice, storage: KVStorage) -> None:
        spec = storage.layout.spec
        self._device = device
        self._unit_bytes = spec.unit_bytes
        self._tables = [group.table for group in spec.groups]
        self._strips = [strips_of(group, spec.block_size) for group in spec.groups]
        self._memory = RankMemory(device.as_bytes(storage), storage.memories)
        self._bounces: list[np.ndarray] = []

    def gather_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, out: Any) -> StreamMark:
        """Gather `pieces` one after the other into `out`, which has at least their size and is filled once the mark is done; until
        then the blocks are read."""
        size_bytes = self._size(pieces)
        if self._device.reaches(out):
            self._move(pieces, blocks, out, into_buffer=True)
            return self._device.fence()
        bounce = self._take(size_bytes)
        self._move(pieces, blocks, bounce, into_buffer=True)

        def finish() -> None:
            out[:size_bytes] = bounce[:size_bytes]
            self._bounces.append(bounce)

        return _Then(self._device.fence(), finish)

    def scatter_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, payload: Any) -> StreamMark:
        """Scatter `pieces`, which lie one after the other in `payload`. It may be reused once the mark is done; until then the
        blocks are written.

        Raises: CorruptSlice if lent blocks are not where the message says they are; nothing is written then.
        """
        if isinstance(payload, LentBlocks):
            for piece in pieces:
                payload.memory.check(piece, payload.ids_of(piece, self._table_of(piece)))
            for piece in pieces:
                self._copy_lent(piece, blocks, payload)
            return self._device.fence()
        if self._device.reaches(payload):
            self._move(pieces, blocks, payload, into_buffer=False)
            return self._device.fence()
        size_bytes = self._size(pieces)
        bounce = self._take(size_bytes)
        bounce[:size_bytes] = payload[:size_bytes]
        self._move(pieces, blocks, bounce, into_buffer=False)
        return _Then(self._device.fence(), lambda: self._bounces.append(bounce))

    def wait(self, at_most_s: float = math.inf) -> bool:
        """Wait until every copy has ended, for at most this time. Returns whether they have."""
        return self._device.wait(at_most_s)

    def _copy_lent(self, piece: KVSlice, blocks: np.ndarray, lent: LentBlocks) -> None:
        table = self._table_of(piece)
        own, theirs = blocks[table, piece.block_lo : piece.block_hi], lent.ids_of(piece, table)
        for strip in self._strips[piece.group]:
            dst, src = self._memory.runs(strip, piece, own), lent.memory.runs(strip, piece, theirs)
            self._copy(dst, src, piece, strip.planes_per_layer, strip.head_bytes)

    def _move(self, pieces: Sequence[KVSlice], blocks: np.ndarray, buffer: Any, *, into_buffer: bool) -> None:
        at = 0
        for piece in pieces:
            own, part = blocks[self._table_of(piece), piece.block_lo : piece.block_hi], piece.part
            packed = GroupMemory(part, piece.num_blocks, self._unit_bytes[piece.group], at)
            for strip in self._strips[piece.group]:
                inside, cache = CopyRuns(buffer, *packed.place(strip, part)), self._memory.runs(strip, piece, own)
                dst, src = (inside, cache) if into_buffer else (cache, inside)
                self._copy(dst, src, piece, strip.planes_per_layer, strip.head_bytes)
            at += packed.size_bytes

    def _copy(self, dst: CopyRuns, src: CopyRuns, piece: KVSlice, planes_per_layer: int, head_bytes: int) -> None:
        """All wanted heads of one block of one plane are neighbours, in the cache and in a payload: one run."""
        planes = planes_per_layer * (piece.layer_hi - piece.layer_lo)
        self._device.copy(dst, src, planes, piece.num_blocks, (piece.head_hi - piece.head_lo) * head_bytes)

    def _table_of(self, piece: KVSlice) -> int:
        """The block table of the piece's layers; 0 for a group that does not exist, which `RankMemory.check` refuses."""
        return self._tables[piece.group] if piece.group < len(self._tables) else 0

    def _size(self, pieces: Sequence[KVSlice]) -> int:
        return sum(piece.size_bytes(self._unit_bytes) for piece in pieces)

    def _take(self, size_bytes: int) -> np.ndarray:
        """A pinned buffer of at least that size. Windows bound how many are in use at once."""
        fitting = [i for i, bounce in enumerate(self._bounces) if len(bounce) >= size_bytes]
        if fitting:
            return self._bounces.pop(fitting[0])
        self._bounces.clear()
        return self._device.host_buffer(size_bytes)


@dataclass
class _Then:
    """Done when `mark` is done and `finish` has run, once, on the thread that polls."""

    mark: StreamMark
    finish: Callable[[], None] | None

    def done(self) -> bool:
        if self.finish is not None:
            if not self.mark.done():
                return False
            self.finish()
            self.finish = None
        return True
