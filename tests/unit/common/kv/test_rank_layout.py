"""Which layers and KV heads each rank holds, and which pairs of nodes are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.base.errors import ConfigError, HandshakeRefused
from common.kv.rank_layout import GroupPart, KVLayout, blocks_for, check_compatible, head_range, heads_fit
from common.kv.spec import KVPlane, KVSpec, LayerGroup

PLAIN = KVSpec.uniform(4, 4, 8, "bfloat16", block_size=16)
LATENT = LayerGroup((0, 1, 2, 3), (KVPlane("latent", 24),), 1, "bfloat16")
MIXED = KVSpec((LayerGroup((1, 3), (KVPlane("k", 8), KVPlane("v", 8)), 4, "bfloat16"), LATENT), block_size=16)


@pytest.mark.parametrize(
    ("num_heads", "tp_size", "ranges"),
    [
        (4, 1, [(0, 4)]),
        (4, 2, [(0, 2), (2, 4)]),
        (6, 3, [(0, 2), (2, 4), (4, 6)]),
        (2, 2, [(0, 1), (1, 2)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_heads_are_split_or_replicated_on_neighbouring_ranks(
    num_heads: int, tp_size: int, ranges: list[tuple[int, int]]
) -> None:
    assert heads_fit(num_heads, tp_size)
    assert [head_range(num_heads, tp_size, rank) for rank in range(tp_size)] == ranges


def test_a_tensor_parallel_size_that_does_not_fit_is_refused_with_those_that_would() -> None:
    assert not heads_fit(4, 3)
    with pytest.raises(ConfigError, match=r"size 3 does not fit 4 KV heads; sizes that would: \[1, 2, 4, 8\]"):
        KVLayout("m", PLAIN, tp_size=3)


@pytest.mark.parametrize("pp_layers", [(1, 2), (2, 3), (4, 0)])
def test_a_pipeline_split_that_does_not_cover_the_layers_is_refused(pp_layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="does not cover 4 layers"):
        KVLayout("m", PLAIN, pp_layers=pp_layers)


def test_ranks_are_counted_by_stage_and_then_by_tensor_parallel_rank() -> None:
    layout = KVLayout("m", PLAIN, tp_size=2, pp_layers=(3, 1))
    assert layout.world_size == 4
    assert [(s.pp_rank, s.tp_rank, s.layer_lo, s.layer_hi) for s in layout.shards()] == [
        (0, 0, 0, 3),
        (0, 1, 0, 3),
        (1, 0, 3, 4),
        (1, 1, 3, 4),
    ]
    assert layout.rank_shard(1).parts == (GroupPart(0, 0, 3, 2, 4),)
    assert layout.rank_shard(2).parts == (GroupPart(0, 3, 4, 0, 2),)


def test_layers_of_a_part_are_counted_within_its_group() -> None:
    layout = KVLayout("m", MIXED, tp_size=2, pp_layers=(1, 1, 2))
    first, second, third = (layout.shard(1, stage).parts for stage in range(3))
    assert first == (GroupPart(0, 0, 0, 2, 4), GroupPart(1, 0, 1, 0, 1)), "layer 0 is not in the first group"
    assert second == (GroupPart(0, 0, 1, 2, 4), GroupPart(1, 1, 2, 0, 1))
    assert third == (GroupPart(0, 1, 2, 2, 4), GroupPart(1, 2, 4, 0, 1))


def test_bytes_of_a_shard_are_those_of_its_layers_and_heads() -> None:
    layout = KVLayout("m", PLAIN, tp_size=2, pp_layers=(3, 1))
    assert [layout.shard_bytes_per_block(shard) for shard in layout.shards()] == [n * 2 * 512 for n in (3, 3, 1, 1)]
    assert sum(layout.shard_bytes_per_block(shard) for shard in layout.shards()) == PLAIN.bytes_per_block
    assert layout.layer_bytes_per_block(layout.rank_shard(0)) == 2 * PLAIN.unit_bytes[0]


def test_replicated_planes_take_their_memory_on_every_rank() -> None:
    layout = KVLayout("m", KVSpec((LATENT,), block_size=16), tp_size=4)
    assert [layout.shard_bytes_per_block(shard) for shard in layout.shards()] == [4 * 16 * 24 * 2] * 4
    mixed = KVLayout("m", MIXED, tp_size=2)
    k_and_v, latent = MIXED.unit_bytes
    assert mixed.shard_bytes_per_block(mixed.rank_shard(0)) == 2 * 2 * k_and_v + 4 * latent
    assert mixed.layer_bytes_per_block(mixed.rank_shard(0)) == max(2 * k_and_v, latent)


def test_overlap_and_containment_of_parts() -> None:
    part = GroupPart(0, 0, 4, 0, 2)
    assert part.overlap(GroupPart(0, 2, 6, 1, 4)) == GroupPart(0, 2, 4, 1, 2)
    assert part.overlap(GroupPart(0, 4, 6, 0, 2)) is None
    assert part.overlap(GroupPart(0, 0, 4, 2, 4)) is None
    assert part.contains(GroupPart(0, 1, 4, 0, 1))
    assert not part.contains(GroupPart(0, 1, 5, 0, 1))
    assert not part.contains(GroupPart(1, 1, 4, 0, 1))
    assert not part.contains(GroupPart(0, 1, 1, 0, 1)), "it is empty"


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_a_partly_filled_block_counts(num_tokens: int, blocks: int) -> None:
    assert blocks_for(num_tokens, 16) == blocks


def test_nodes_with_different_parallel_splits_are_compatible() -> None:
    src, dst = KVLayout("m", PLAIN, tp_size=8), KVLayout("m", PLAIN, pp_layers=(3, 1))
    check_compatible(src, dst)
    assert src.kv_kind == dst.kv_kind


GROUP = PLAIN.groups[0]


@pytest.mark.parametrize(
    ("spec", "difference"),
    [
        (replace(PLAIN, block_size=32), "block_size differs: prefill node has 16, decode node has 32"),
        (KVSpec.uniform(4, 4, 8, "float16", block_size=16), "dtype differs: .*'bfloat16', decode node has 'float16'"),
        (KVSpec.uniform(5, 4, 8, "bfloat16", block_size=16), "num_layers differs: .* 4, decode node has 5"),
        (KVSpec((GROUP, LATENT), 16), "number of layer groups differs: .* 1, decode node has 2"),
        (KVSpec.uniform(4, 2, 8, "bfloat16", block_size=16), "number of KV heads differs: .* 4, decode node has 2"),
        (
            KVSpec.uniform(4, 4, 16, "bfloat16", block_size=16),
            r"planes differs: .*\[\('k', 8\), \('v', 8\)\], decode node has \[\('k', 16\), \('v', 16\)\]",
        ),
    ],
)
def test_nodes_with_different_specs_are_refused_with_the_difference(spec: KVSpec, difference: str) -> None:
    src, dst = KVLayout("m", PLAIN), KVLayout("m", spec)
    assert src.kv_kind != dst.kv_kind
    with pytest.raises(HandshakeRefused, match=difference):
        check_compatible(src, dst)


def test_a_difference_in_one_of_several_groups_names_the_group() -> None:
    first, latent = MIXED.groups
    for other, difference in [
        (
            replace(first, layers=(0, 1, 3)),
            r"layers of layer group 0 differs: .* \[1, 3\], decode node has \[0, 1, 3\]",
        ),
        (replace(first, num_heads=2), "number of KV heads of layer group 0 differs"),
        (replace(first, planes=(KVPlane("k", 8),)), "planes of layer group 0 differs"),
    ]:
        with pytest.raises(HandshakeRefused, match=difference):
            check_compatible(KVLayout("m", MIXED), KVLayout("m", KVSpec((other, latent), 16)))


def test_nodes_with_different_models_are_refused() -> None:
    with pytest.raises(HandshakeRefused, match="fingerprint differs: prefill node has 'm', decode node has 'n'"):
        check_compatible(KVLayout("m", PLAIN), KVLayout("n", PLAIN))
