"""Where each layer, plane, block and head lies in a rank's KV memory."""

from __future__ import annotations

import pytest
import torch

from common.kv.memory_layout import GroupMemory, Strip, group_memories, strips_of
from common.kv.rank_layout import GroupPart, KVLayout
from common.kv.spec import KVPlane, KVSpec, LayerGroup
from common.kv.storage import KVStorage

PLAIN = KVSpec.uniform(3, 4, 8, "bfloat16", block_size=16)
HEAD_BYTES = 16 * 8 * 2
"""Bytes of one head of one block of K or V."""
LATENT = LayerGroup((0, 1, 2), (KVPlane("latent", 24), KVPlane("rope", 8)), 1, "bfloat16")
MIXED = KVSpec((*PLAIN.groups, LATENT), block_size=16)
BLOCKS = 5


def test_equally_wide_planes_are_one_strip_and_others_one_each() -> None:
    assert strips_of(PLAIN.groups[0], 16) == (Strip(2, HEAD_BYTES, 0),)
    assert strips_of(LATENT, 16) == (Strip(1, 16 * 24 * 2, 0), Strip(1, 16 * 8 * 2, 16 * 24 * 2))


def test_memory_of_a_plain_spec_is_in_order_of_layers_planes_blocks_heads_slots_and_numbers() -> None:
    layout = KVLayout("m", PLAIN, tp_size=2)
    storage = KVStorage(layout, layout.shard(1, 0), BLOCKS)
    numbers = storage.data.view(torch.int16)
    numbers.copy_(torch.arange(numbers.numel()))
    expected = torch.arange(3 * 2 * BLOCKS * 2 * 16 * 8, dtype=torch.int16).view(3, 2, BLOCKS, 2, 16, 8)
    group = storage.groups[0]
    assert torch.equal(group.stacked.view(torch.int16), expected)
    assert torch.equal(group.planes["k"].view(torch.int16), expected[:, 0])
    assert torch.equal(group.planes["v"].view(torch.int16), expected[:, 1])


def test_planes_of_different_widths_lie_one_after_the_other_in_each_layer() -> None:
    layout = KVLayout("m", KVSpec((LATENT,), block_size=16))
    storage = KVStorage(layout, layout.shard(0, 0), BLOCKS)
    numbers = storage.data.view(torch.int16)
    numbers.copy_(torch.arange(numbers.numel()))
    layers = numbers.view(3, BLOCKS * 16 * (24 + 8))
    latent, rope = layers.split([BLOCKS * 16 * 24, BLOCKS * 16 * 8], dim=1)
    planes = storage.groups[0].planes
    assert torch.equal(planes["latent"].view(torch.int16), latent.unflatten(1, (BLOCKS, 1, 16, 24)))
    assert torch.equal(planes["rope"].view(torch.int16), rope.unflatten(1, (BLOCKS, 1, 16, 8)))


def test_a_replicated_group_is_whole_on_every_rank() -> None:
    layout = KVLayout("m", MIXED, tp_size=4)
    for shard in layout.shards():
        k_and_v, latent = group_memories(MIXED, shard.parts, BLOCKS)
        assert k_and_v.part == GroupPart(0, 0, 3, shard.tp_rank, shard.tp_rank + 1)
        assert k_and_v.size_bytes == 3 * BLOCKS * 2 * HEAD_BYTES
        assert latent.part == GroupPart(1, 0, 3, 0, 1)
        assert latent.size_bytes == 3 * BLOCKS * 16 * 32 * 2


@pytest.mark.parametrize(("num_blocks", "offset"), [(8, 256), (9, 512)])
def test_groups_follow_each_other_at_aligned_offsets(num_blocks: int, offset: int) -> None:
    """A block of the first group takes 32 bytes."""
    narrow = LayerGroup((0,), (KVPlane("index", 1),), 1, "bfloat16")
    spec = KVSpec((narrow, LATENT), block_size=16)
    first, second = group_memories(spec, KVLayout("m", spec).shard(0, 0).parts, num_blocks)
    assert (first.offset, first.size_bytes) == (0, 32 * num_blocks)
    assert second.offset == offset


def test_a_stage_without_layers_of_a_group_has_no_memory_for_it() -> None:
    late = LayerGroup((2,), (KVPlane("index", 4),), 1, "bfloat16")
    spec = KVSpec((*PLAIN.groups, late), block_size=16)
    layout = KVLayout("m", spec, pp_layers=(2, 1))
    assert [group_memories(spec, shard.parts, BLOCKS)[1].size_bytes for shard in layout.shards()] == [0, BLOCKS * 128]


def test_a_piece_is_placed_by_its_first_layer_and_head() -> None:
    memory = GroupMemory(GroupPart(0, 4, 8, 2, 6), BLOCKS, 2 * HEAD_BYTES, offset=1024)
    [strip] = strips_of(PLAIN.groups[0], 16)
    plane_bytes, block_bytes = BLOCKS * 4 * HEAD_BYTES, 4 * HEAD_BYTES
    assert memory.layer_bytes == 2 * plane_bytes
    assert memory.place(strip, memory.part) == (1024, plane_bytes, block_bytes)
    piece = GroupPart(0, 5, 7, 3, 5)
    assert memory.place(strip, piece) == (1024 + memory.layer_bytes + HEAD_BYTES, plane_bytes, block_bytes)


def test_a_piece_of_planes_of_different_widths_is_placed_plane_by_plane() -> None:
    layout = KVLayout("m", KVSpec((LATENT,), block_size=16))
    [memory] = group_memories(layout.spec, layout.shard(0, 0).parts, BLOCKS)
    latent, rope = strips_of(LATENT, 16)
    piece = GroupPart(0, 1, 2, 0, 1)
    assert memory.place(latent, piece) == (memory.layer_bytes, memory.layer_bytes, 16 * 24 * 2)
    assert memory.place(rope, piece) == (memory.layer_bytes + BLOCKS * 16 * 24 * 2, memory.layer_bytes, 16 * 8 * 2)
