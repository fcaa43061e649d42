"""A batch's block tables as flat int32 lists, the form that paged-attention kernels take. Runs on the CPU only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from common.attention.base import AttentionShape
from common.kv.rank_layout import blocks_for


def blocks_in_window(
    shape: AttentionShape, query_len: int, context_len: int, table: list[int]
) -> tuple[list[int], int]:
    """(blocks, context length) of one entry, whose rows are the context's last `query_len`, without the leading blocks that
    lie wholly before the windows of all its rows. Positions then count from the first block that is left."""
    first = 0
    if shape.window is not None:
        first = max(0, context_len - query_len + 1 - shape.window) // shape.block_size
    return table[first : blocks_for(context_len, shape.block_size)], context_len - first * shape.block_size


def longest_table(shape: AttentionShape, num_blocks: int) -> int:
    """Blocks that `blocks_in_window` leaves to a decode row at most, in a cache of `num_blocks`."""
    longest = blocks_for(shape.max_context, shape.block_size) or num_blocks
    return longest if shape.window is None else min(longest, 1 + blocks_for(shape.window - 1, shape.block_size))


@dataclass(frozen=True)
class BlockLists:
    """The KV blocks of N sequences, concatenated. All tensors are int32, in host memory, pinned if requested."""

    indptr: Tensor
    """[N + 1]: the blocks of sequence i are `indices[indptr[i]:indptr[i + 1]]`, exactly those of `blocks_in_window`."""
    indices: Tensor
    """[indptr[N]]"""
    last_page_len: Tensor
    """[N]: number of slots that the context fills in its last block, at least 1. The name is flashinfer's."""


def block_lists(
    shape: AttentionShape,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[list[int]],
    *,
    pinned: bool,
) -> BlockLists:
    """Flatten `block_tables`, which may have more blocks than the contexts need, never fewer."""
    entries = zip(query_lens, context_lens, block_tables, strict=True)
    used = [blocks_in_window(shape, *entry) for entry in entries]
    last = [(context_len - 1) % shape.block_size + 1 for _, context_len in used]
    return BlockLists(
        indptr=host_int32([0, *accumulate(len(blocks) for blocks, _ in used)], pinned=pinned),
        indices=host_int32(list(chain.from_iterable(blocks for blocks, _ in used)), pinned=pinned),
        last_page_len=host_int32(last, pinned=pinned),
    )


def host_int32(values: list[int], *, pinned: bool) -> Tensor:
    """[len(values)] int32 in host memory; from pinned memory the copy to a device is asynchronous."""
    tensor = torch.from_numpy(np.array(values, dtype=np.int32))
    return tensor.pin_memory() if pinned else tensor
