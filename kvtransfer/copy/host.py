"""Gather and scatter between paged KV and contiguous payloads, with NumPy alone. Runs on I/O threads.

No torch operation may run there: the first one would start an OpenMP team of that thread, which fights the
engine's for the cores. NumPy copies on the calling thread and lets go of the interpreter lock meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import gcd
from typing import Any, Protocol

import numpy as np
import torch

from common.base.errors import ConfigError
from common.kv.storage import KVStorage
from kvtransfer.copy.device import Mark, RelayDevice
from kvtransfer.copy.device_copy import DeviceCopier
from kvtransfer.wire import KVSlice


class Copier(Protocol):
    """Copies slices of one rank's storage into and out of a connection's buffers, [bytes] of uint8."""

    def gather_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, out: Any) -> Mark | None:
        """Gather `pieces` one after the other into `out`, at least their bytes.

        It is filled on return where that gives None, else once the mark is done; until then the blocks are read.
        """
        ...

    def scatter_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, payload: Any) -> Mark | None:
        """Scatter `pieces`, which lie one after the other in `payload`.

        It may be reused on return where that gives None, else once the mark is done; until then the blocks are written.
        Raises: CorruptSlice if `payload` is no such thing; nothing is written then.
        """
        ...

    def wait(self, at_most_s: float = math.inf) -> bool:
        """Until every copy has ended, but no longer than that; whether they have."""
        ...


def make_copier(storage: KVStorage, device: RelayDevice | None) -> Copier:
    """What copies in `storage`, which is in CPU memory or on `device`. Raises: ConfigError."""
    return SliceCopier(storage) if device is None else DeviceCopier(device, storage)


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

    def wait(self, at_most_s: float = math.inf) -> bool:
        """As `Copier.wait`: they have ended already."""
        return True

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


class _Writable:
    """An array's memory, said to be writable, and kept for as long as anybody looks at it."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def as_tensor(buffer: Any) -> torch.Tensor:
    """A tensor over the memory of an array; tensors as they are. Runs no operator.

    Received memory is read-only, and the caller may only read it: PyTorch knows no such tensors, and would warn.
    """
    if isinstance(buffer, torch.Tensor):
        return buffer
    array = buffer if buffer.flags.writeable else np.asarray(_Writable(buffer))
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
