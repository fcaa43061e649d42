"""Paged attention by PyTorch alone, on any device: `scaled_dot_product_attention` on KV blocks that are gathered first.

It is the fallback on GPUs without flashinfer, and for dtypes and head sizes without a flashinfer kernel. It computes in the
dtype of the queries and runs on a rank's engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from common.attention.base import AttentionMetadata, AttentionShape, PlannedPrompt
from common.attention.block_lists import blocks_in_window, host_int32, longest_table
from common.attention.scaled_attention import scaled_attention
from common.kernels.float8 import E4M3, narrow, widen, words_of
from common.kv.storage import GroupStorage

_MAX_SCORES = 2**26
"""Maximum scores per query block: rows times query heads times context; 256 MB in float32."""
_MAX_GATHERED = 2**26
"""Maximum K/V elements gathered at once for decode rows; a single row may exceed it."""


@dataclass(frozen=True)
class _Decodes:
    """Sequences of one row each, padded to the same number of KV blocks."""

    blocks: Tensor
    """[B, max_blocks] int64"""
    hidden: Tensor
    """[B, max_blocks * block_size] bool, true past the end of the context and before its window."""


class PagedCache:
    """One rank's KV memory: appending to it, and attending to KV blocks gathered from it."""

    def __init__(self, kv: GroupStorage, shape: AttentionShape) -> None:
        self.shape = shape
        self.data = kv.stacked
        self.scales = kv.scales
        self.block_size = kv.block_size

    def sinks(self, layer: int) -> Tensor | None:
        """[kv_heads, q_heads / kv_heads]"""
        return self.shape.sinks[layer].view(self.shape.num_kv_heads, -1) if self.shape.sinks else None

    def append(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """k, v: [T, kv_heads, head_dim]; slots: [T] int64."""
        where = (slots // self.block_size, slots % self.block_size)
        for side, rows, scale in zip(self.data[layer], (k, v), self.scales[layer], strict=False):
            by_slot = words_of(side).transpose(1, 2)
            by_slot.index_put_(where, words_of(narrow(rows, side.dtype, scale)))

    def gather(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """blocks: [B, max_blocks]. Returns [planes, B, kv_heads, max_blocks * block_size, head_dim], unscaled."""
        cache = words_of(self.data[layer])
        taken = cache.index_select(1, blocks.flatten()).view(self.data.dtype)
        values = widen(taken) if self.data.dtype == E4M3 else taken
        return values.to(dtype).unflatten(1, blocks.shape).transpose(2, 3).flatten(3, 4)

    def attend_decodes(self, layer: int, decodes: _Decodes, q: Tensor) -> Tensor:
        """q: [B, q_heads, head_dim]. Returns the same shape. Takes some rows at a time to bound the gathered memory."""
        each = len(self.data[0]) * decodes.hidden.size(1) * self.data.size(3) * self.data.size(5)
        parts = [
            self._attend_gathered(layer, _Decodes(blocks, hidden), rows)
            for blocks, hidden, rows in zip(
                *(part.split(max(1, _MAX_GATHERED // each)) for part in (decodes.blocks, decodes.hidden, q)),
                strict=True,
            )
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_gathered(self, layer: int, decodes: _Decodes, q: Tensor) -> Tensor:
        gathered = self.gather(layer, decodes.blocks, q.dtype)
        # A reused block may hold anything past the end, a freed one before the window, and NaN or infinity times zero is NaN.
        gathered.masked_fill_(decodes.hidden[:, None, :, None], 0.0)
        keys, values = gathered[0], gathered[-1]
        k_scale, v_scale = self.scales[layer][0], self.scales[layer][-1]
        rows = (q * k_scale).unflatten(1, (keys.size(1), -1))
        seen = ~decodes.hidden[:, None, None]
        sinks = self.sinks(layer)
        out = scaled_attention(rows, keys, values, seen, self.shape.scale, self.shape.soft_cap, sinks)
        return out.mul_(v_scale).reshape(q.shape)


class SdpaAttention:
    """`AttentionBackend` for one rank's `GroupStorage` of K and V, or of one plane that is both.

    For CUDA graphs it gathers the longest possible context for every row, so these are faster for short contexts only.
    """

    def __init__(self, kv: GroupStorage, shape: AttentionShape, graph_rows: int = 0) -> None:
        """`graph_rows`: decode rows of each step, in static memory; 0: any step."""
        self._kv = kv
        self._shape = shape
        self._cache = PagedCache(kv, shape)
        self._device = kv.device
        self._graph_blocks = longest_table(shape, kv.num_blocks) if graph_rows else 0
        """KV blocks of each row in static memory."""
        self._slots = torch.empty(0, dtype=torch.int64)
        self._decodes: _Decodes | None = None
        if graph_rows:
            self._slots = torch.zeros(graph_rows, dtype=torch.int64, device=kv.device)
            length = self._graph_blocks * kv.block_size
            self._decodes = _Decodes(
                torch.zeros(graph_rows, self._graph_blocks, dtype=torch.int64, device=kv.device),
                torch.ones(graph_rows, length, dtype=torch.bool, device=kv.device),
            )
        self._prefills: list[PlannedPrompt] = []
        """Each with blocks [num_blocks] int64."""

    def plan(self, metadata: AttentionMetadata) -> None:
        n = metadata.num_decode_rows
        decodes = _decodes(metadata, n, self._shape, self._device, self._graph_blocks) if n else None
        if self._graph_blocks and self._decodes is not None and decodes is not None:
            self._slots.copy_(metadata.slot_mapping)
            self._decodes.blocks.copy_(decodes.blocks)
            self._decodes.hidden.copy_(decodes.hidden)
            return
        self._slots, self._decodes = metadata.slot_mapping, decodes
        self._prefills = []
        row = n
        for i in range(n, len(metadata.query_lens)):
            query_len = metadata.query_lens[i]
            table, context_len = blocks_in_window(
                self._shape, query_len, metadata.context_lens[i], metadata.block_tables[i]
            )
            self._prefills.append(PlannedPrompt(row, row + query_len, context_len, _put(table, self._device)))
            row += query_len

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._cache.append(layer, k, v, self._slots)
        parts: list[Tensor] = []
        if self._decodes is not None:
            parts.append(self._cache.attend_decodes(layer, self._decodes, q[: self._decodes.blocks.size(0)]))
        parts += [self._attend_prompt(layer, prefill, q[prefill.row_lo : prefill.row_hi]) for prefill in self._prefills]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_prompt(self, layer: int, seq: PlannedPrompt, q: Tensor) -> Tensor:
        """q: [C, q_heads, head_dim], the last C positions of the context. Returns the same shape."""
        shape, num_rows = self._shape, q.size(0)
        gathered = self._cache.gather(layer, seq.blocks[None], q.dtype)[:, 0, :, : seq.context_len]
        keys, values = gathered[0], gathered[-1]
        k_scale, v_scale = self._cache.scales[layer][0], self._cache.scales[layer][-1]
        group = shape.num_q_heads // shape.num_kv_heads
        sinks = self._cache.sinks(layer)
        block = max(16, _MAX_SCORES // (shape.num_q_heads * seq.context_len))
        parts: list[Tensor] = []
        for lo in range(0, num_rows, block):
            n = min(block, num_rows - lo)
            seen = seq.context_len - num_rows + lo + n
            begin = 0 if shape.window is None else max(0, seen - n + 1 - shape.window)
            mask = torch.ones(n, seen - begin, dtype=torch.bool, device=self._device).tril_(seen - begin - n)
            if shape.window is not None:
                mask.triu_(seen - begin - n + 1 - shape.window)
            # The query heads that share a KV head are rows of one product.
            rows = (q[lo : lo + n] * k_scale).view(n, shape.num_kv_heads, group, -1).permute(1, 2, 0, 3).flatten(1, 2)
            out = scaled_attention(
                rows,
                keys[:, begin:seen],
                values[:, begin:seen],
                mask.repeat(group, 1),
                shape.scale,
                shape.soft_cap,
                None if sinks is None else sinks.repeat_interleave(n, 1),
            )
            parts.append(out.unflatten(1, (group, n)).permute(2, 0, 1, 3).flatten(1, 2))
        return torch.cat(parts).mul_(v_scale)

    def for_graph(self, rows: int) -> SdpaAttention:
        return SdpaAttention(self._kv, self._shape, rows)


def _decodes(
    metadata: AttentionMetadata, num: int, shape: AttentionShape, device: torch.device, max_blocks: int = 0
) -> _Decodes:
    """The first `num` sequences, each padded to `max_blocks`, or to as many as the longest has, with its own last block, so
    that no other sequence's KV is read."""
    used = [
        blocks_in_window(shape, 1, context_len, table)
        for table, context_len in zip(metadata.block_tables[:num], metadata.context_lens[:num], strict=True)
    ]
    max_blocks = max_blocks or max(len(blocks) for blocks, _ in used)
    padded = chain.from_iterable(blocks + blocks[-1:] * (max_blocks - len(blocks)) for blocks, _ in used)
    ends = _put([context_len for _, context_len in used], device)[:, None]
    positions = torch.arange(max_blocks * shape.block_size, device=device)
    hidden = positions >= ends
    if shape.window is not None:
        hidden |= positions < ends - shape.window
    return _Decodes(_put(list(padded), device).view(num, max_blocks), hidden)


def _put(values: list[int], device: torch.device) -> Tensor:
    """[len(values)] int64 on `device`, copied asynchronously."""
    return host_int32(values, pinned=device.type == "cuda").to(device, non_blocking=True).long()
