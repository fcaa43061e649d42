"""Gather and scatter between paged KV and contiguous payloads, with NumPy alone. Runs on I/O threads.

No torch operation may run there: the first one would start an OpenMP team of that thread, which fights the
engine's for the cores. NumPy copies on the calling thread and lets go of the interpreter lock meanwhile.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import gcd
from typing import Any, Protocol

import numpy as np
import torch

from common.errors import ConfigError
from common.kv.storage import KVStorage
from kvtransfer.wire import KVSlice


class Copier(Protocol):
    """Copies slices of one rank's storage into and out of a connection's buffers, [bytes] of uint8."""

    def gather_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, out: Any) -> None:
        """Gather `pieces` one after the other into `out`, at least their bytes; it is filled on return."""
        ...

    def scatter_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, payload: Any) -> None:
        """Scatter `pieces`, which lie one after the other in `payload`; it may be reused on return."""
        ...


def make_copier(storage: KVStorage) -> Copier:
    """What copies in `storage`, wherever it is."""
    return SliceCopier(storage) if storage.words is not None else DeviceCopier(storage)


class SliceCopier:
    """Copies slices of one rank's storage.

    Each plane of the storage (K or V of a layer) is seen as rows, each the longest run that is contiguous both in it
    and in the slice: a whole block where the slice has all heads of the rank, else neighbouring heads of a block.
    One `take` or one indexed store then moves any number of blocks of a plane.

    Raises: ConfigError if the storage is not in CPU memory.
    """

    def __init__(self, storage: KVStorage) -> None:
        if storage.words is None:
            raise ConfigError("this transport needs a KV storage in CPU memory")
        planes = 2 * len(storage.words)
        self._planes = storage.words.reshape(planes, -1).view(np.uint8)
        self._layout = storage.layout
        self._shard = storage.shard
        self._head_bytes = storage.layout.slice_bytes_per_block // 2

    def gather(self, piece: KVSlice, blocks: np.ndarray, out: np.ndarray) -> None:
        """Copy `piece` of the sequence whose block ids are `blocks` into `out` ([piece's bytes], uint8)."""
        planes, index = self._rows(piece, blocks)
        for rows, part in zip(planes, out.view(planes.dtype).reshape(len(planes), -1), strict=True):
            # mode="raise" would buffer the whole output; the index is in range by construction.
            np.take(rows, index, out=part, mode="clip")

    def scatter(self, piece: KVSlice, blocks: np.ndarray, payload: np.ndarray) -> None:
        """Copy `payload` ([piece's bytes], uint8) into `piece` of the sequence whose block ids are `blocks`."""
        planes, index = self._rows(piece, blocks)
        for rows, part in zip(planes, payload.view(planes.dtype).reshape(len(planes), -1), strict=True):
            rows[index] = part

    def gather_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, out: np.ndarray) -> None:
        """Gather `pieces` one after the other into `out` (uint8, at least their bytes)."""
        at = 0
        for piece in pieces:
            size_bytes = piece.size_bytes(self._layout)
            self.gather(piece, blocks, out[at : at + size_bytes])
            at += size_bytes

    def scatter_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, payload: np.ndarray) -> None:
        """Scatter `pieces`, which lie one after the other in `payload` (uint8)."""
        at = 0
        for piece in pieces:
            size_bytes = piece.size_bytes(self._layout)
            self.scatter(piece, blocks, payload[at : at + size_bytes])
            at += size_bytes

    def _rows(self, piece: KVSlice, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The piece's planes (K or V of a layer) as rows, and the index of the piece's rows, the same in each plane."""
        heads = self._shard.head_hi - self._shard.head_lo
        head_lo, wanted = piece.head_lo - self._shard.head_lo, piece.head_hi - piece.head_lo
        lo, hi = piece.layer_lo - self._shard.layer_lo, piece.layer_hi - self._shard.layer_lo
        run = gcd(head_lo, wanted, heads)
        first = blocks[piece.block_lo : piece.block_hi, None] * (heads // run)
        index = first + np.arange(head_lo // run, (head_lo + wanted) // run)
        row = np.dtype((np.void, run * self._head_bytes))
        return self._planes[2 * lo : 2 * hi].view(row), index.reshape(-1)


class DeviceCopier:
    """As `SliceCopier`, for a storage on a CUDA device; buffers there or in CPU memory. Never run on a GPU so far.

    The engine must call `blocks_final` only after the writes of that layer have ended on the device.
    """

    def __init__(self, storage: KVStorage) -> None:
        self._data = storage.data.view(torch.uint8)
        self._layout = storage.layout
        self._shard = storage.shard

    def gather_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, out: Any) -> None:
        """As `Copier.gather_all`."""
        target = as_tensor(out)
        at = 0
        for piece in pieces:
            view, ids = self._select(piece, blocks)
            part = view.index_select(2, ids).reshape(-1)
            target[at : at + part.numel()].copy_(part)
            at += part.numel()
        self._wait()

    def scatter_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, payload: Any) -> None:
        """As `Copier.scatter_all`."""
        source = as_tensor(payload)
        at = 0
        for piece in pieces:
            view, ids = self._select(piece, blocks)
            shape = (*view.shape[:2], len(ids), *view.shape[3:])
            size_bytes = piece.size_bytes(self._layout)
            part = source[at : at + size_bytes].to(self._data.device).reshape(shape)
            view.index_copy_(2, ids, part)
            at += size_bytes
        self._wait()

    def _select(self, piece: KVSlice, blocks: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The piece's layers and heads of every block, and the ids of its blocks."""
        shard = self._shard
        view = self._data[
            piece.layer_lo - shard.layer_lo : piece.layer_hi - shard.layer_lo,
            :,
            :,
            piece.head_lo - shard.head_lo : piece.head_hi - shard.head_lo,
        ]
        return view, as_tensor(blocks[piece.block_lo : piece.block_hi]).to(self._data.device)

    def _wait(self) -> None:
        if self._data.is_cuda:
            torch.cuda.current_stream(self._data.device).synchronize()


def as_tensor(buffer: Any) -> torch.Tensor:
    """A tensor over the memory of an array; tensors as they are. Runs no operator."""
    if isinstance(buffer, torch.Tensor):
        return buffer
    with warnings.catch_warnings():
        # Received memory is read-only; it is only read here.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(buffer)  # pyright: ignore[reportUnknownMemberType]
