"""Gathering and scattering between paged KV and contiguous payloads, in CPU memory. Runs on I/O threads.

No torch operation may run there: the first one would start an OpenMP team for that thread, which competes with the
engine's for the cores. NumPy and the native library copy on the calling thread and release the interpreter lock meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any, Protocol

import numpy as np
import torch

from common.base.errors import ConfigError
from common.kernels.native.find import find_native
from common.kernels.native.library import NativeLibrary
from common.kv.memory_layout import Strip, strips_of
from common.kv.storage import KVStorage
from kvtransfer.copy.device import RelayDevice, StreamMark
from kvtransfer.copy.device_copy import DeviceCopier
from kvtransfer.wire import KVSlice


class Copier(Protocol):
    """Copies slices of one rank's storage into and out of a connection's buffers, [bytes] of uint8."""

    def gather_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, out: Any) -> StreamMark | None:
        """Gather `pieces` one after the other into `out`, which has at least their size.

        If this returns None, `out` is filled; otherwise it is once the mark is done, and until then the blocks are read.
        """
        ...

    def scatter_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, payload: Any) -> StreamMark | None:
        """Scatter `pieces`, which lie one after the other in `payload`.

        If this returns None, `payload` may be reused; otherwise it may be once the mark is done, and until then the
        blocks are written. Raises: CorruptSlice if `payload` does not hold them; nothing is written then.
        """
        ...

    def wait(self, at_most_s: float = math.inf) -> bool:
        """Wait until every copy has ended, for at most this time. Returns whether they have."""
        ...


def make_copier(storage: KVStorage, device: RelayDevice | None) -> Copier:
    """The copier for `storage`, which is on `device`, or in CPU memory if that is None. Raises: ConfigError."""
    return SliceCopier(storage, find_native()) if device is None else DeviceCopier(device, storage)


class SliceCopier:
    """Copies slices of one rank's storage.

    Each plane of a layer is seen as rows. A row is the longest run that is contiguous both in the plane and in the
    slice: a whole block where the slice has all heads of the rank, else neighbouring heads of a block. One `take` or
    one indexed store then moves any number of blocks of a plane, one call of the native library those of all planes.

    Raises: ConfigError if the storage is not in CPU memory.
    """

    def __init__(self, storage: KVStorage, native: NativeLibrary | None = None) -> None:
        """native: scatters instead of NumPy; it writes past the caches."""
        self._native = native
        data = storage.host_bytes
        if data is None:
            raise ConfigError("this transport needs a KV storage in CPU memory")
        spec = storage.layout.spec
        self._unit_bytes = spec.unit_bytes
        self._table_of = [group.table for group in spec.groups]
        self._parts = storage.shard.parts
        self._strips: list[list[tuple[Strip, np.ndarray]]] = []
        """For each group, its strips and their planes: [layers * planes_per_layer, bytes]."""
        for group, memory in zip(spec.groups, storage.memories, strict=True):
            own, units = (
                data[memory.offset : memory.offset + memory.size_bytes],
                memory.num_blocks * memory.part.num_heads,
            )
            strips = strips_of(group, spec.block_size)
            self._strips.append([(strip, _planes(own, memory.part.num_layers, strip, units)) for strip in strips])

    def gather(self, piece: KVSlice, blocks: np.ndarray, out: np.ndarray) -> None:
        """Copy `piece` of the sequence whose block tables are `blocks` into `out` ([piece's bytes], uint8)."""
        for rows, index, packed in self._rows(piece, blocks, out):
            for plane, part in zip(rows, packed, strict=True):
                # mode="raise" would buffer the whole output; the index is in range by construction.
                np.take(plane, index, out=part, mode="clip")

    def scatter(self, piece: KVSlice, blocks: np.ndarray, payload: np.ndarray) -> None:
        """Copy `payload` ([piece's bytes], uint8) into `piece` of the sequence whose block tables are `blocks`."""
        native = self._native
        for rows, index, packed in self._rows(piece, blocks, payload):
            if native is None:
                for plane, part in zip(rows, packed, strict=True):
                    plane[index] = part
            else:
                native.scatter_rows(
                    rows.ctypes.data,
                    rows.strides[0],
                    len(rows),
                    index.ctypes.data,
                    len(index),
                    rows.itemsize,
                    packed.ctypes.data,
                    packed.strides[0],
                )

    def gather_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, out: np.ndarray) -> None:
        """Gather `pieces` one after the other into `out` (uint8, at least their size)."""
        at = 0
        for piece in pieces:
            size_bytes = piece.size_bytes(self._unit_bytes)
            self.gather(piece, blocks, out[at : at + size_bytes])
            at += size_bytes

    def scatter_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, payload: np.ndarray) -> None:
        """Scatter `pieces`, which lie one after the other in `payload` (uint8)."""
        at = 0
        for piece in pieces:
            size_bytes = piece.size_bytes(self._unit_bytes)
            self.scatter(piece, blocks, payload[at : at + size_bytes])
            at += size_bytes

    def wait(self, at_most_s: float = math.inf) -> bool:
        """True: every copy ended with the call that made it."""
        return True

    def _rows(
        self, piece: KVSlice, blocks: np.ndarray, packed: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each strip of the piece's group: the piece's planes as rows, the index of the piece's rows, which is the
        same in each plane, and those rows in `packed` by plane."""
        part = self._parts[piece.group]
        heads, wanted = part.head_hi - part.head_lo, piece.head_hi - piece.head_lo
        head_lo, lo = piece.head_lo - part.head_lo, piece.layer_lo - part.layer_lo
        layers, count = piece.layer_hi - piece.layer_lo, piece.block_hi - piece.block_lo
        run = gcd(head_lo, wanted, heads)
        first = blocks[self._table_of[piece.group], piece.block_lo : piece.block_hi, None] * (heads // run)
        index = (first + np.arange(head_lo // run, (head_lo + wanted) // run)).reshape(-1)
        for strip, planes in self._strips[piece.group]:
            row, per_layer = np.dtype((np.void, run * strip.head_bytes)), strip.planes_per_layer
            own = planes[per_layer * lo : per_layer * (lo + layers)]
            yield own.view(row), index, _planes(packed, layers, strip, count * wanted).view(row)


def _planes(data: np.ndarray, num_layers: int, strip: Strip, num_units: int) -> np.ndarray:
    """[layers * planes_per_layer, bytes], without a copy: the planes of `strip` in `data`, which holds `num_units` heads
    of a block in each layer and plane of the group."""
    begin = num_units * strip.bytes_before
    end = begin + num_units * strip.planes_per_layer * strip.head_bytes
    layers = data.reshape(num_layers, data.size // max(1, num_layers))[:, begin:end]
    return layers.reshape(num_layers * strip.planes_per_layer, (end - begin) // strip.planes_per_layer)


class _Writable:
    """An array's memory, declared writable and kept alive by whatever views it."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def as_tensor(buffer: Any) -> torch.Tensor:
    """A tensor over the memory of an array; a tensor is returned unchanged. Runs no operator.

    Received memory is read-only, and the caller may only read it. PyTorch has no read-only tensors and would warn.
    """
    if isinstance(buffer, torch.Tensor):
        return buffer
    array = buffer if buffer.flags.writeable else np.asarray(_Writable(buffer))
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
