"""A batch's sequences and pages as flat lists of 32-bit numbers, the form that paged kernels take. Pure host work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from common.kv.layout import blocks_for


@dataclass(frozen=True)
class PageLists:
    """Pages of N sequences, one after the other. All int32, in host memory, pinned if asked for."""

    indptr: Tensor
    """[N + 1]: sequence i has the pages `indices[indptr[i]:indptr[i + 1]]`, exactly those of its context."""
    indices: Tensor
    """[indptr[N]]"""
    last_page_len: Tensor
    """[N], slots of the last page that the context fills, at least 1."""


def page_lists(
    context_lens: Sequence[int], block_tables: Sequence[list[int]], block_size: int, *, pinned: bool
) -> PageLists:
    """`block_tables` may have more blocks than the contexts need, never fewer."""
    counts = [blocks_for(context_len, block_size) for context_len in context_lens]
    used = (table[:count] for table, count in zip(block_tables, counts, strict=True))
    last = [(context_len - 1) % block_size + 1 for context_len in context_lens]
    return PageLists(
        indptr=host_int32([0, *accumulate(counts)], pinned=pinned),
        indices=host_int32(list(chain.from_iterable(used)), pinned=pinned),
        last_page_len=host_int32(last, pinned=pinned),
    )


def host_int32(values: list[int], *, pinned: bool) -> Tensor:
    """[len(values)] int32 in host memory; pinned memory can be copied to a device without waiting."""
    tensor = torch.from_numpy(np.array(values, dtype=np.int32))
    return tensor.pin_memory() if pinned else tensor
