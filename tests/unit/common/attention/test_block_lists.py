"""Flat lists of the KV blocks that a batch attends to."""

from __future__ import annotations

import torch

from common.attention.block_lists import block_lists


def test_lists_have_the_blocks_of_the_contexts_and_no_more() -> None:
    lists = block_lists([1, 16, 17], [[7, 8], [3], [5, 4, 9]], 16, pinned=False)
    assert lists.indptr.tolist() == [0, 1, 2, 4]
    assert lists.indices.tolist() == [7, 3, 5, 4]
    assert lists.last_page_len.tolist() == [1, 16, 1]
    assert {tensor.dtype for tensor in (lists.indptr, lists.indices, lists.last_page_len)} == {torch.int32}
