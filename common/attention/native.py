"""Paged attention on a CPU by the native kernels, straight from the KV blocks. Runs on a rank's engine thread."""

from __future__ import annotations

import ctypes
import math
from array import array
from itertools import accumulate, chain

import torch
from torch import Tensor

from common.attention.base import AttentionMetadata, AttentionShape
from common.attention.striped import StripeBatch
from common.kernels.native.library import DTYPES, BatchStruct, CacheStruct, NativeLibrary
from common.kv.rank_layout import blocks_for
from common.kv.storage import GroupStorage

_WRONG = {
    1: "a KV block is outside the cache",
    2: "an entry has no rows, or more than its context",
    3: "a slot is outside the cache",
}
"""enum kv_batch_error."""


class NativeAttention:
    """`AttentionBackend` for one rank's `GroupStorage` of K and V, for any mix of prefill chunks and decode rows. A group's only
    plane is both."""

    def __init__(self, kv: GroupStorage, shape: AttentionShape, native: NativeLibrary) -> None:
        self._kv = kv
        self._shape = shape
        self._native = native
        self._scale = 1.0 / math.sqrt(shape.head_dim) if shape.scale is None else shape.scale
        data = kv.stacked
        self._sinks = shape.sinks
        self._caches = [
            CacheStruct(
                data[layer, 0].data_ptr(),
                data[layer, -1].data_ptr(),
                DTYPES[kv.dtype],
                shape.num_kv_heads,
                shape.head_dim,
                shape.block_size,
                kv.scales[layer][0],
                kv.scales[layer][-1],
                shape.window or 0,
                shape.soft_cap or 0.0,
                shape.sinks[layer].data_ptr() if shape.sinks else None,
            )
            for layer in range(data.size(0))
        ]
        self._addresses = [ctypes.addressof(cache) for cache in self._caches]
        self._batch = BatchStruct()
        self.batch = ctypes.addressof(self._batch)
        """Address of the planned step's struct kv_batch."""
        self._numbers: array[int] = array("i")
        self._slots: array[int] | Tensor = array("q")
        """The memory that this struct points to."""

    def cache(self, layer: int) -> int:
        """Address of a layer's struct kv_cache. Layers are counted from this rank's first."""
        return self._addresses[layer]

    def plan(self, metadata: AttentionMetadata) -> None:
        """Raises: ValueError for a block or slot outside the cache, or for more rows than a context has."""
        slots = metadata.slot_mapping.contiguous()
        lens = metadata.query_lens, metadata.context_lens
        self._plan(*lens, metadata.block_tables, slots.data_ptr(), slots.numel())
        self._slots = slots

    def plan_rows(self, context_lens: list[int], block_tables: list[list[int]], slots: array[int]) -> None:
        """`plan` for one row of each sequence. slots: [T] int64."""
        self._plan([1] * len(context_lens), context_lens, block_tables, *slots.buffer_info())
        self._slots = slots

    def _plan(
        self,
        query_lens: list[int],
        context_lens: list[int],
        tables: list[list[int]],
        slots: int,
        num_slots: int,
        bounds: tuple[list[int], ...] = (),
    ) -> None:
        """slots: address of [num_slots] int64. bounds: for a stripe, [T] starts and [T] ends of the tokens that rows attend to."""
        block_size = self._shape.block_size
        num_entries = len(query_lens)
        sizes = [blocks_for(context_len, block_size) for context_len in context_lens]
        first_rows = [0, *accumulate(query_lens)]
        first_blocks = [0, *accumulate(sizes)]
        blocks = chain.from_iterable(
            table if len(table) == size else table[:size] for table, size in zip(tables, sizes, strict=True)
        )
        numbers = self._numbers = array("i", [*first_rows, *context_lens, *first_blocks, *blocks])
        if len(numbers) != 3 * num_entries + 2 + first_blocks[-1] or num_slots != first_rows[-1]:
            raise ValueError("a KV block or a slot is missing")
        at_bounds = len(numbers)
        for bound in bounds:
            numbers.extend(bound)
        at, size = numbers.buffer_info()[0], numbers.itemsize
        batch = self._batch
        batch.num_entries, batch.num_rows = num_entries, num_slots
        batch.first_rows = at
        batch.context_lens = at + size * (num_entries + 1)
        batch.first_blocks = at + size * (2 * num_entries + 1)
        batch.block_ids = at + size * (3 * num_entries + 2)
        batch.slots = slots
        if bounds:
            batch.row_starts = at + size * at_bounds
            batch.row_ends = at + size * (at_bounds + num_slots)
            batch.partial_dim = self._shape.value_dim
        wrong = self._native.check_batch(self.batch, self._kv.num_blocks, block_size)
        if wrong:
            raise ValueError(f"{_WRONG[wrong]} (the cache has {self._kv.num_blocks} KV blocks)")

    def for_graph(self, rows: int) -> NativeAttention:
        """A separate backend: without CUDA graphs, a CPU repeats a step by calling it."""
        return NativeAttention(self._kv, self._shape, self._native)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._forward(layer, q, k, v, torch.empty(q.shape, dtype=q.dtype))

    def _forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        native = self._native
        q, k, v = _with_whole_rows(q), _with_whole_rows(k), _with_whole_rows(v)
        native.attention_forward(
            native.team,
            self._addresses[layer],
            self.batch,
            q.size(1),
            self._scale,
            DTYPES[q.dtype],
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            out.data_ptr(),
        )
        return out


class NativePartialAttention(NativeAttention):
    """`PartialAttention` by the native kernels, which read the KV blocks in place."""

    def plan_stripe(self, batch: StripeBatch) -> None:
        """Raises: ValueError for a block or a slot that is not there."""
        entries = batch.entries
        slots = batch.slots.contiguous()
        self._plan(
            [entry.row_hi - entry.row_lo for entry in entries],
            [int(entry.ends[-1]) if entry.blocks else 0 for entry in entries],
            [entry.blocks for entry in entries],
            slots.data_ptr(),
            slots.numel(),
            (
                [int(start) for entry in entries for start in entry.starts],
                [int(end) for entry in entries for end in entry.ends],
            ),
        )
        self._slots = slots

    def forward_stripe(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._forward(layer, q, k, v, torch.empty(*q.shape[:2], self._shape.value_dim + 1))

    def join(self, parts: Tensor, sinks: Tensor | None) -> Tensor:
        parts = parts.contiguous()
        stripes, rows, heads, width = parts.shape
        out = torch.empty(rows, heads, width - 1, dtype=self._shape.dtype)
        native, dtype = self._native, DTYPES[out.dtype]
        at_sinks = None if sinks is None else sinks.data_ptr()
        native.join_partials(
            native.team, parts.data_ptr(), stripes, rows, heads, width - 1, at_sinks, dtype, out.data_ptr()
        )
        return out


def _with_whole_rows(x: Tensor) -> Tensor:
    """`x` [T, heads, dim] with the heads of a row side by side."""
    return x if x.stride(2) == 1 and x.stride(1) == x.size(2) else x.contiguous()
