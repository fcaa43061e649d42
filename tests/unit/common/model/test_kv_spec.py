"""Layer groups and block tables of models with sliding windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.kv.memory_layout import group_memories, rank_bytes
from common.kv.rank_layout import KVLayout
from common.model.config import ModelConfig, load_model_config
from common.model.kv_spec import kv_spec


def with_windows(config: ModelConfig, windows: list[int | None]) -> ModelConfig:
    layer = config.layers[0]
    layers = tuple(replace(layer, attention=replace(layer.attention, window=window)) for window in windows)
    return replace(config, layers=layers)


@pytest.fixture
def config(folder: Path) -> ModelConfig:
    return load_model_config(folder)


@pytest.mark.parametrize("window", [None, 64])
def test_layers_of_one_kind_have_one_table(config: ModelConfig, window: int | None) -> None:
    spec = kv_spec(with_windows(config, [window] * 6), "float32")
    assert (spec.num_tables, spec.windows, len(spec.groups)) == (1, (window,), 1)


def test_layers_of_two_kinds_are_cut_to_tables_of_about_equal_size(config: ModelConfig) -> None:
    """As Gemma 3 1B: 26 layers, every sixth of them full."""
    windows = [None if (n + 1) % 6 == 0 else 512 for n in range(26)]
    spec = kv_spec(with_windows(config, windows), "float32")
    assert sorted(len(group.layers) for group in spec.groups) == [3, 3, 4, 4, 4, 4, 4]
    assert [group.table for group in spec.groups] == list(range(7))
    assert sorted(spec.windows, key=lambda window: window or 0) == [None] + [512] * 6
    assert sorted(layer for group in spec.groups for layer in group.layers) == list(range(26))
    for group in spec.groups:
        assert {windows[layer] for layer in group.layers} == {group.window}


def test_few_layers_of_a_kind_do_not_make_many_tables(config: ModelConfig) -> None:
    spec = kv_spec(with_windows(config, [None] + [16] * 40), "float32")
    assert spec.num_tables <= 9


def test_tables_share_a_ranks_memory_and_each_stage_of_a_pipeline_has_a_part_of_all(config: ModelConfig) -> None:
    spec = kv_spec(with_windows(config, [512, None] * 6), "float32")
    assert [len(group.layers) for group in spec.groups] == [6, 6]
    layout = KVLayout("m", spec, pp_layers=(6, 6))
    for shard in layout.shards():
        memories = group_memories(spec, shard.parts, 10)
        assert [memory.offset for memory in memories] == [0, 0]
        assert [memory.part.num_layers for memory in memories] == [3, 3]
        assert rank_bytes(memories) == 10 * layout.shard_bytes_per_block(shard) == 10 * spec.bytes_per_block // 4
