"""Gathering and scattering between paged KV and contiguous payloads, in CPU memory. Runs on I/O threads.

No torch operation may run there: the first one would start an OpenMP team for that thread, which competes with the
engine's for the cores. NumPy and the native library copy on the calling thread and release the interpreter lock meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from math import gcd

import numpy as np

from common.kernels.native.library import NativeLibrary
from common.kv.memory_layout import Strip, strips_of
from common.kv.storage import KVStorage
from kvtransfer.wire import KVSlice


class SliceCopier:
    """Copies slices of a storage in CPU memory; the calls of `DeviceCopier`, which end before they return.

    Each plane of a layer is seen as rows. A row is the longest run that is contiguous both in the plane and in the
    slice: a whole block where the slice has all heads of the rank, else neighbouring heads of a block. One `take` or
    one indexed store then moves any number of blocks of a plane, one call of the native library those of all planes.
    """

    def __init__(self, storage: KVStorage, native: NativeLibrary | None = None) -> None:
        """native: scatters instead of NumPy; it writes past the caches."""
        self._native = native
        data = storage.host_bytes
        assert data is not None
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

    def gather_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, out: np.ndarray) -> None:
        for rows, index, packed in self._rows(pieces, blocks, out):
            for plane, part in zip(rows, packed, strict=True):
                # mode="raise" would buffer the whole output; the index is in range by construction.
                np.take(plane, index, out=part, mode="clip")

    def scatter_all(self, pieces: Sequence[KVSlice], blocks: np.ndarray, payload: np.ndarray) -> None:
        native = self._native
        for rows, index, packed in self._rows(pieces, blocks, payload):
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

    def wait(self, at_most_s: float = math.inf) -> bool:
        return True  # every copy ended with the call that made it

    def _rows(
        self, pieces: Sequence[KVSlice], blocks: np.ndarray, buffer: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each piece and each strip of its group: the piece's planes as rows, the index of the piece's rows, which is the
        same in each plane, and those rows in `buffer` by plane. The pieces lie one after the other in `buffer`."""
        at = 0
        for piece in pieces:
            packed = buffer[at : at + piece.size_bytes(self._unit_bytes)]
            at += len(packed)
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
