"""Paged attention on a CPU by the native kernels, straight from the KV blocks. Runs on a rank's engine thread."""

from __future__ import annotations

import ctypes
import math
import operator
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from common.attention.base import AttentionMetadata, AttentionShape
from common.kernels.native.library import DTYPES, BatchStruct, CacheStruct, NativeLibrary
from common.kv.rank_layout import blocks_for
from common.kv.storage import GroupStorage


class NativeAttention:
    """`AttentionBackend` for one rank's `GroupStorage` of K and V, for any mix of prefill chunks and decode rows.

    Not thread-safe; `forward` calls belong to the latest `plan`.
    """

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
                data[layer, 1].data_ptr(),
                DTYPES[kv.dtype],
                shape.num_kv_heads,
                shape.head_dim,
                shape.block_size,
                *kv.scales[layer],
                shape.window or 0,
                shape.soft_cap or 0.0,
                shape.sinks[layer].data_ptr() if shape.sinks else None,
            )
            for layer in range(data.size(0))
        ]
        self._addresses = [ctypes.addressof(cache) for cache in self._caches]
        self._batch = BatchStruct()
        self._planned: tuple[np.ndarray, Tensor] | None = None

    @property
    def batch(self) -> int:
        """Address of the planned step's struct kv_batch."""
        return ctypes.addressof(self._batch)

    def cache(self, layer: int) -> int:
        """Address of a layer's struct kv_cache. Layers are counted from this rank's first."""
        return self._addresses[layer]

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare for the next step's `forward` calls, one per layer.

        Raises: ValueError for a block or slot outside the cache, or for more rows than a context has.
        """
        num_entries = len(metadata.query_lens)
        sizes = [blocks_for(context_len, self._shape.block_size) for context_len in metadata.context_lens]
        first_rows = [0, *accumulate(metadata.query_lens)]
        first_blocks = [0, *accumulate(sizes)]
        tables = chain.from_iterable(
            table if len(table) == size else table[:size]
            for table, size in zip(metadata.block_tables, sizes, strict=True)
        )
        numbers = np.array([*first_rows, *metadata.context_lens, *first_blocks, *tables], np.int32)
        slots = metadata.slot_mapping.contiguous()
        blocks = numbers[3 * num_entries + 2 :]
        num_blocks = self._kv.num_blocks
        if blocks.size != first_blocks[-1] or int(blocks.min()) < 0 or int(blocks.max()) >= num_blocks:
            raise ValueError(f"a KV block is missing or outside the cache of {num_blocks}")
        if any(map(operator.gt, metadata.query_lens, metadata.context_lens)) or min(metadata.query_lens) < 1:
            raise ValueError("an entry has no rows, or more than its context")
        low, high = slots.aminmax()
        if slots.numel() != first_rows[-1] or int(low) < 0 or int(high) >= num_blocks * self._shape.block_size:
            raise ValueError(f"a slot is missing or outside the cache of {num_blocks} blocks")
        at, size = numbers.ctypes.data, numbers.itemsize
        self._planned = numbers, slots
        batch = self._batch
        batch.num_entries, batch.num_rows = num_entries, first_rows[-1]
        batch.first_rows = at
        batch.context_lens = at + size * (num_entries + 1)
        batch.first_blocks = at + size * (2 * num_entries + 1)
        batch.block_ids = at + size * (3 * num_entries + 2)
        batch.slots = slots.data_ptr()

    def for_graph(self, rows: int) -> NativeAttention:
        """A separate backend: without CUDA graphs, a CPU repeats a step by calling it."""
        return NativeAttention(self._kv, self._shape, self._native)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append `k`, `v` to layer `layer` (counted from this rank's first), then attend causally.

        q: [T, q_heads/tp, head_dim]; k, v: [T, kv_heads/tp, head_dim], rope applied.
        Returns [T, q_heads/tp, head_dim], q's dtype.
        """
        out = torch.empty(q.shape, dtype=q.dtype)
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


def _with_whole_rows(x: Tensor) -> Tensor:
    """`x` [T, heads, dim] with the heads of a row side by side."""
    return x if x.stride(2) == 1 and x.stride(1) == x.size(2) else x.contiguous()
