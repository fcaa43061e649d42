"""A batch's block tables as flat int32 lists, the form that paged-attention kernels take. Runs on the CPU only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from common.kv.rank_layout import blocks_for


@dataclass(frozen=True)
class BlockLists:
    """The KV blocks of N sequences, concatenated. All tensors are int32, in host memory, pinned if requested."""

    indptr: Tensor
    """[N + 1]: the blocks of sequence i are `indices[indptr[i]:indptr[i + 1]]`, exactly those of its context."""
    indices: Tensor
    """[indptr[N]]"""
    last_page_len: Tensor
    """[N]: number of slots that the context fills in its last block, at least 1. The name is flashinfer's."""


def block_lists(
    context_lens: Sequence[int], block_tables: Sequence[list[int]], block_size: int, *, pinned: bool
) -> BlockLists:
    """Flatten `block_tables`, which may have more blocks than the contexts need, never fewer."""
    counts = [blocks_for(context_len, block_size) for context_len in context_lens]
    used = (table[:count] for table, count in zip(block_tables, counts, strict=True))
    last = [(context_len - 1) % block_size + 1 for context_len in context_lens]
    return BlockLists(
        indptr=host_int32([0, *accumulate(counts)], pinned=pinned),
        indices=host_int32(list(chain.from_iterable(used)), pinned=pinned),
        last_page_len=host_int32(last, pinned=pinned),
    )


def host_int32(values: list[int], *, pinned: bool) -> Tensor:
    """[len(values)] int32 in host memory; from pinned memory the copy to a device is asynchronous."""
    tensor = torch.from_numpy(np.array(values, dtype=np.int32))
    return tensor.pin_memory() if pinned else tensor
