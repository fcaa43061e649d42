"""Paged attention on a CPU with eager tensor operations. Runs on a rank's engine thread.

All matrix products run in float32: bf16 gains little at the small shapes of attention, and many CPUs emulate it. The
query heads that share a KV head are viewed as rows of one product; K and V are never repeated.
Measured against F.scaled_dot_product_attention with repeated heads and query blocks of 256 (fp32, 14 q heads,
2 kv heads of 64, chunk 512): equal within noise from 512 to 2,048 tokens of context, faster for short chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.attention.base import AttentionMetadata, AttentionShape, PlannedPrompt
from common.attention.block_lists import blocks_in_window
from common.attention.scaled_attention import scaled_attention, softmax
from common.kernels.float8 import narrow, widen, words_of
from common.kv.storage import GroupStorage

_SCORE_BYTES = 2 * 2**20
"""Size of the scores of one query block, about what fits the L2 cache; sets the number of its rows."""
_SCORE_ROWS = (16, 256)
"""Fewest and most rows of a query block."""
_SHORT_BLOCKS = 16
"""Decode sequences of up to this many KV blocks share a group whatever their lengths."""


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences with one row each, of similar length, padded to the longest."""

    rows: Tensor | None
    """[B] rows of the batch; None if the group is the whole batch in order."""
    blocks: Tensor
    """[planes * B * kv_heads * max_blocks] rows of a layer viewed as [planes * num_blocks * kv_heads, block_size, head_dim]."""
    bias: Tensor
    """[B, 1, 1, max_blocks * block_size] float32, -inf past each sequence's end and before its window."""


class CpuAttention:
    """`AttentionBackend` for one rank's `GroupStorage` of K and V, for any mix of prefill chunks and decode rows. A group's only
    plane is both."""

    def __init__(self, kv: GroupStorage, shape: AttentionShape) -> None:
        self._kv = kv
        self._data = kv.stacked
        self._kv_scales = kv.scales
        self._shape = shape
        self._scale = 1.0 / math.sqrt(shape.head_dim) if shape.scale is None else shape.scale
        self._sinks = [sinks.view(shape.num_kv_heads, -1) for sinks in shape.sinks]
        self._heads = torch.arange(shape.num_kv_heads)
        planes = torch.arange(len(kv.planes))[:, None, None, None] * kv.num_blocks * shape.num_kv_heads
        self._first_rows = planes + self._heads[:, None]
        """[planes (K, V), 1, kv_heads, 1]: the rows of block 0."""
        self._slots = torch.empty(0, dtype=torch.int64)
        """[T * kv_heads] rows of K (or V) of a layer viewed as [num_blocks * kv_heads * block_size, head_dim]."""
        self._groups: list[_DecodeGroup] = []
        self._prefills: list[PlannedPrompt] = []
        """Each has the form of `_DecodeGroup.blocks`."""

    def plan(self, metadata: AttentionMetadata) -> None:
        block_size = self._shape.block_size
        slots, heads = metadata.slot_mapping, self._shape.num_kv_heads
        first = slots + slots // block_size * ((heads - 1) * block_size)
        self._slots = (first[:, None] + self._heads * block_size).flatten()
        self._prefills = []
        decodes: list[tuple[int, int, list[int]]] = []
        row = 0
        entries = zip(metadata.query_lens, metadata.context_lens, metadata.block_tables, strict=True)
        for index, (query_len, whole, table) in enumerate(entries):
            blocks, context_len = blocks_in_window(self._shape, query_len, whole, table)
            if index < metadata.num_decode_rows:
                decodes.append((row, context_len, blocks))
            else:
                self._prefills.append(PlannedPrompt(row, row + query_len, context_len, self._rows_of_blocks([blocks])))
            row += query_len
        self._groups = [self._plan_group(group, row) for group in _by_length(decodes)]

    def for_graph(self, rows: int) -> CpuAttention:
        """A separate backend: without CUDA graphs, a CPU repeats a step by calling it."""
        return CpuAttention(self._kv, self._shape)

    def _plan_group(self, group: list[tuple[int, int, list[int]]], num_rows: int) -> _DecodeGroup:
        longest = max(len(blocks) for _, _, blocks in group)
        # A sequence is padded with its own last block, so that no other sequence's KV is read.
        blocks = self._rows_of_blocks([blocks + blocks[-1:] * (longest - len(blocks)) for _, _, blocks in group])
        rows = [row for row, _, _ in group]
        lens = torch.tensor([context_len for _, context_len, _ in group])
        positions = torch.arange(longest * self._shape.block_size)
        hidden = positions >= lens[:, None]
        if self._shape.window is not None:
            hidden |= positions < (lens - self._shape.window)[:, None]
        bias = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, None, None]
        return _DecodeGroup(None if rows == list(range(num_rows)) else torch.tensor(rows), blocks, bias)

    def _rows_of_blocks(self, tables: list[list[int]]) -> Tensor:
        """Rows of all heads of a group's blocks, [planes, B, kv_heads, max_blocks] flattened."""
        return (torch.tensor(tables)[:, None] * self._shape.num_kv_heads + self._first_rows).flatten()

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self._data[layer]
        scales = self._kv_scales[layer]
        k_scale, v_scale = scales[0], scales[-1]
        for plane, rows, scale in zip(words_of(cache).flatten(1, 3), (k, v), scales, strict=False):
            plane.index_copy_(0, self._slots, words_of(narrow(rows.flatten(0, 1), cache.dtype, scale)))
        if k_scale == v_scale == 1.0:
            return self._attend(layer, cache, q)
        # Scores are linear in K and results in V: scaling queries and results avoids scaling every number read.
        return self._attend(layer, cache, q.float() * k_scale).mul_(v_scale).to(q.dtype)

    def _attend(self, layer: int, cache: Tensor, q: Tensor) -> Tensor:
        """Attend to `cache`, the contents of the layer, without its scales. q and result: as in `forward`."""
        sinks = self._sinks[layer] if self._sinks else None
        if not self._prefills and len(self._groups) == 1 and self._groups[0].rows is None:
            return self._decode(self._groups[0], cache, q, sinks).to(q.dtype)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            rows = group.rows if group.rows is not None else slice(None)
            out[rows] = self._decode(group, cache, q[rows], sinks).to(q.dtype)
        for prefill in self._prefills:
            rows = slice(prefill.row_lo, prefill.row_hi)
            self._prefill(prefill, cache, q[rows], out[rows], sinks)
        return out

    def _gather(self, cache: Tensor, blocks: Tensor, batch: int) -> Tensor:
        """The planes of `blocks`, widened: [planes, batch, kv_heads, slots, head_dim] float32."""
        gathered = widen(cache.flatten(0, 2).index_select(0, blocks))
        return gathered.view(len(cache), batch, self._shape.num_kv_heads, -1, self._shape.head_dim)

    def _decode(self, group: _DecodeGroup, cache: Tensor, q: Tensor, sinks: Tensor | None) -> Tensor:
        """q: [B, q_heads, head_dim]; sinks: [kv_heads, group]. Returns the shape of q, float32."""
        gathered = self._gather(cache, group.blocks, q.size(0))
        keys, values = gathered[0], gathered[-1]
        rows = q.float().view(q.size(0), self._shape.num_kv_heads, -1, self._shape.head_dim)
        out = scaled_attention(rows, keys, values, group.bias, self._scale, self._shape.soft_cap, sinks)
        if not out.sum().isfinite():
            # A reused block may hold anything past the end, a freed one before the window, and NaN or infinity times zero is
            # NaN. Clearing it every time would cost as much as attention itself where lengths differ.
            hidden = group.bias.isneginf().transpose(2, 3)
            keys, values = keys.masked_fill_(hidden, 0.0), values.masked_fill_(hidden, 0.0)
            out = scaled_attention(rows, keys, values, group.bias, self._scale, self._shape.soft_cap, sinks)
        return out.reshape(q.shape)

    def _prefill(self, seq: PlannedPrompt, cache: Tensor, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """q, out: [C, q_heads, head_dim], the last C positions of the context.

        Query blocks are small enough that their scores stay in the CPU cache; none reads keys past its last row, or before
        the window of its first.
        """
        gathered = self._gather(cache, seq.blocks, 1)[:, 0]
        keys, values = gathered[0].transpose(1, 2), gathered[-1]
        q = q.float() * self._scale
        heads, dim = self._shape.num_kv_heads, self._shape.head_dim
        window, soft_cap = self._shape.window, self._shape.soft_cap
        group = self._shape.num_q_heads // heads
        num_rows = q.size(0)
        before = seq.context_len - num_rows
        block = _block_rows(self._shape.num_q_heads, seq.context_len)
        future = torch.full((block, block), -math.inf).triu_(1)
        for lo in range(0, num_rows, block):
            n = min(block, num_rows - lo)
            seen = before + lo + n
            begin = 0 if window is None else max(0, before + lo + 1 - window)
            rows = q[lo : lo + n].view(n, heads, group, dim).permute(1, 2, 0, 3)
            rows = rows.reshape(heads, group * n, dim)
            scores = torch.bmm(rows, keys[:, :, begin:seen])
            if soft_cap is not None:
                scores.div_(soft_cap).tanh_().mul_(soft_cap)
            by_row = scores.view(heads, group, n, seen - begin)
            by_row[..., seen - begin - n :].add_(future[:n, :n])
            behind = 0 if window is None else seen - begin - window
            if behind > 0:  # keys that the last row does not see; each row before it does not see one fewer
                by_row[..., n - behind :, :behind].add_(future.t()[1 : behind + 1, :behind])
            of_rows = None if sinks is None else sinks.repeat_interleave(n, 1)
            attended = torch.bmm(softmax(scores, of_rows), values[:, begin:seen])
            out[lo : lo + n].view(n, heads, group, dim).copy_(attended.view(heads, group, n, dim).permute(2, 0, 1, 3))


def _block_rows(num_q_heads: int, context_len: int) -> int:
    """Rows of a query block whose scores fill `_SCORE_BYTES`, within `_SCORE_ROWS`, a multiple of 16."""
    fewest, most = _SCORE_ROWS
    rows = _SCORE_BYTES // (4 * num_q_heads * context_len)
    return max(fewest, min(most, rows - rows % 16))


def _by_length(decodes: list[tuple[int, int, list[int]]]) -> list[list[tuple[int, int, list[int]]]]:
    """Groups of (row, context length, blocks) in which no sequence is padded to more than twice its blocks.

    Short sequences always form one group: for them an operation costs more than its padding.
    """
    if not decodes:
        return []
    if max(len(blocks) for _, _, blocks in decodes) <= max(
        _SHORT_BLOCKS, 2 * min(len(blocks) for _, _, blocks in decodes)
    ):
        return [decodes]
    groups: list[list[tuple[int, int, list[int]]]] = []
    for item in sorted(decodes, key=lambda item: len(item[2]), reverse=True):
        longest = len(groups[-1][0][2]) if groups else math.inf
        if longest <= max(_SHORT_BLOCKS, 2 * len(item[2])):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups
