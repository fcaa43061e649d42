"""What `NativeAttention` refuses: the conformance suite tests what it computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.native_variants import VARIANTS, native

from common.attention.base import AttentionMetadata, AttentionShape
from common.attention.native import NativeAttention
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage

BLOCKS = 4
STEP = AttentionMetadata([1, 3], [17, 3], [[0, 3], [1]], torch.tensor([48, 16, 17, 18]))


@pytest.fixture
def attention() -> NativeAttention:
    layout = KVLayout("f", KVSpec.uniform(1, 2, 64, "bfloat16"))
    storage = KVStorage(layout, layout.shard(0, 0), BLOCKS)
    return NativeAttention(storage.groups[0], AttentionShape(4, 2, 64, torch.bfloat16, 16), native(VARIANTS[0]))


@pytest.mark.parametrize("slots", [[48, 16, 17, BLOCKS * 16], [-1, 16, 17, 18], [48, 16, 17], [48, 16, 17, 18, 19]])
def test_a_slot_that_is_missing_or_outside_the_cache_is_refused(attention: NativeAttention, slots: list[int]) -> None:
    attention.plan(STEP)
    with pytest.raises(ValueError, match="slot"):
        attention.plan(replace(STEP, slot_mapping=torch.tensor(slots)))


@pytest.mark.parametrize("tables", [[[0, BLOCKS], [1]], [[0, 3], [-1]], [[0], [1]], [[0, 3], []]])
def test_a_block_that_is_missing_or_outside_the_cache_is_refused(
    attention: NativeAttention, tables: list[list[int]]
) -> None:
    with pytest.raises(ValueError, match="block"):
        attention.plan(replace(STEP, block_tables=tables))


def test_a_chunk_longer_than_its_context_is_refused(attention: NativeAttention) -> None:
    with pytest.raises(ValueError, match="context"):
        attention.plan(replace(STEP, context_lens=[17, 2]))
