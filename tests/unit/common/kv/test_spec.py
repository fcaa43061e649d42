"""Sizes of a model's KV per token and block, and specs that are refused."""

from __future__ import annotations

import pytest

from common.base.errors import ConfigError
from common.kv.spec import KVPlane, KVSpec, LayerGroup

K_AND_V = (KVPlane("k", 64), KVPlane("v", 64))
LATENT = (KVPlane("latent", 512), KVPlane("rope", 64))


def test_a_plain_spec_keeps_k_and_v_for_every_layer_and_head() -> None:
    spec = KVSpec.uniform(24, 2, 64, "bfloat16", block_size=16)
    assert spec.groups == (LayerGroup(tuple(range(24)), K_AND_V, 2, "bfloat16"),)
    assert spec.num_layers == 24
    assert spec.groups[0].token_bytes == 2 * 64 * 2
    assert spec.bytes_per_token == 24 * 2 * (2 * 64 * 2)
    assert spec.unit_bytes == (16 * 2 * 64 * 2,)
    assert spec.bytes_per_block == 16 * spec.bytes_per_token


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 2), ("float16", 2), ("float8_e4m3", 1)])
def test_sizes_follow_the_dtype(dtype: str, item_bytes: int) -> None:
    spec = KVSpec.uniform(3, 4, 8, dtype, block_size=32)
    assert spec.bytes_per_token == 3 * 4 * 2 * 8 * item_bytes
    assert spec.bytes_per_block == 32 * 3 * 4 * 2 * 8 * item_bytes


def test_groups_add_up_each_with_its_own_layers_planes_heads_and_dtype() -> None:
    groups = LayerGroup((0, 2), K_AND_V, 4, "bfloat16"), LayerGroup((1, 2, 3), LATENT, 1, "float8_e4m3")
    spec = KVSpec(groups, block_size=16)
    assert spec.num_layers == 4
    assert spec.dtype == "bfloat16+float8_e4m3"
    assert [group.token_bytes for group in groups] == [256, 576]
    assert spec.unit_bytes == (16 * 256, 16 * 576)
    assert spec.bytes_per_token == 256 * 2 * 4 + 576 * 3 * 1


def test_a_group_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown KV dtype 'int4'; known: float32, bfloat16"):
        LayerGroup((0,), K_AND_V, 1, "int4")
    for layers, planes, heads in [((), K_AND_V, 1), ((0,), (), 1), ((0,), K_AND_V, 0), ((0,), (KVPlane("k", 0),), 1)]:
        with pytest.raises(ConfigError, match="needs layers, planes and heads"):
            LayerGroup(layers, planes, heads, "bfloat16")
    for layers in [(1, 0), (0, 0), (-1, 0)]:
        with pytest.raises(ConfigError, match="must be ascending"):
            LayerGroup(layers, K_AND_V, 1, "bfloat16")


def test_a_spec_that_leaves_out_a_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers \[0, 2\] are in no group"):
        KVSpec((LayerGroup((1, 3), K_AND_V, 1, "bfloat16"),))
    with pytest.raises(ConfigError, match="needs layer groups"):
        KVSpec(())
