"""Flat lists of the KV blocks that a batch attends to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.attention.base import AttentionShape
from common.attention.block_lists import block_lists, longest_table

SHAPE = AttentionShape(4, 2, 16, torch.float32, 16)


def test_lists_have_the_blocks_of_the_contexts_and_no_more() -> None:
    lists = block_lists(SHAPE, [1, 16, 2], [1, 16, 17], [[7, 8], [3], [5, 4, 9]], pinned=False)
    assert lists.indptr.tolist() == [0, 1, 2, 4]
    assert lists.indices.tolist() == [7, 3, 5, 4]
    assert lists.last_page_len.tolist() == [1, 16, 1]
    assert {tensor.dtype for tensor in (lists.indptr, lists.indices, lists.last_page_len)} == {torch.int32}


def test_blocks_before_the_windows_of_all_rows_are_left_out() -> None:
    tables = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]]
    lists = block_lists(replace(SHAPE, window=16), [1, 1, 1, 17], [32, 33, 17, 48], tables, pinned=False)
    assert lists.indptr.tolist() == [0, 1, 3, 5, 7]
    assert lists.indices.tolist() == [2, 2, 3, 1, 2, 2, 3]
    assert lists.last_page_len.tolist() == [16, 1, 1, 16]


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 18, 33])
def test_a_decode_row_reads_at_most_as_many_blocks_as_are_reserved_for_it(window: int) -> None:
    shape = replace(SHAPE, window=window)
    tables = [list(range(10))] * 160
    lists = block_lists(shape, [1] * 160, list(range(1, 161)), tables, pinned=False)
    assert lists.indptr.diff().max() == longest_table(shape, 10) == longest_table(replace(shape, max_context=160), 99)
