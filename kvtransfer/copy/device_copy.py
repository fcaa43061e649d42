"""Gather and scatter where KV lies on a device: each is one kind of copy, of runs between pages and a buffer.

Runs on I/O threads, which only start copies; a `Mark` tells when one has ended. KV that another process lends is
copied from its pages straight into ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.kv.storage import KVStorage
from kvtransfer.copy.device import LentBlocks, Mark, RelayDevice, Runs, pages_of
from kvtransfer.wire import KVSlice


class DeviceCopier:
    """As `SliceCopier`, for KV on a device. Buffers that it does not reach are filled and read by way of pinned memory."""

    def __init__(self, device: RelayDevice, storage: KVStorage) -> None:
        self._device = device
        self._layout = storage.layout
        self._pages = pages_of(storage, device)
        self._bounces: list[np.ndarray] = []

    def gather_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, out: Any) -> Mark:
        """As `Copier.gather_all`; `out` is filled when the mark is done."""
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

    def scatter_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, payload: Any) -> Mark:
        """As `Copier.scatter_all`; `payload` may be reused when the mark is done.

        Raises: CorruptSlice if lent blocks are not where they are said to be; nothing is written then.
        """
        if isinstance(payload, LentBlocks):
            sources = [payload.runs(piece) for piece in pieces]
            for piece, source in zip(pieces, sources, strict=True):
                self._copy(self._own(piece, blocks), source, piece)
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
        """As `Copier.wait`."""
        return self._device.wait(at_most_s)

    def _move(self, pieces: Sequence[KVSlice], blocks: np.ndarray, buffer: Any, *, into_buffer: bool) -> None:
        at = 0
        for piece in pieces:
            run_bytes, count = self._run_bytes(piece), piece.block_hi - piece.block_lo
            inside = Runs(buffer, at, count * run_bytes, run_bytes)
            pages = self._own(piece, blocks)
            self._copy(*((inside, pages) if into_buffer else (pages, inside)), piece)
            at += piece.size_bytes(self._layout)

    def _copy(self, dst: Runs, src: Runs, piece: KVSlice) -> None:
        planes, blocks = 2 * (piece.layer_hi - piece.layer_lo), piece.block_hi - piece.block_lo
        self._device.copy(dst, src, planes, blocks, self._run_bytes(piece))

    def _own(self, piece: KVSlice, blocks: np.ndarray) -> Runs:
        return self._pages.runs(piece, blocks[piece.block_lo : piece.block_hi])

    def _run_bytes(self, piece: KVSlice) -> int:
        """All wanted heads of one block of one plane: they are neighbours in the pages and in a payload."""
        return (piece.head_hi - piece.head_lo) * self._pages.head_bytes

    def _size(self, pieces: Sequence[KVSlice]) -> int:
        return sum(piece.size_bytes(self._layout) for piece in pieces)

    def _take(self, size_bytes: int) -> np.ndarray:
        """A pinned buffer of at least that size. As many exist as were ever needed at once, which windows bound."""
        fitting = [i for i, bounce in enumerate(self._bounces) if len(bounce) >= size_bytes]
        if fitting:
            return self._bounces.pop(fitting[0])
        self._bounces.clear()
        return self._device.host_buffer(size_bytes)


@dataclass
class _Then:
    """Done when `mark` is and `finish` has run, once, on the thread that looks."""

    mark: Mark
    finish: Callable[[], None] | None

    def done(self) -> bool:
        if self.finish is not None:
            if not self.mark.done():
                return False
            self.finish()
            self.finish = None
        return True
