"""Qwen3, mixture of experts: as Qwen3, with experts in all layers but those that config.json names."""

from __future__ import annotations

from typing import Any, cast

from common.model.config_file import ConfigFile
from common.model.description import LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, repeat_layer
from common.model.families.mixtures import read_mixture, read_router, with_mixtures
from common.model.families.windows import window_if_switched_on, with_windows


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    bias = config.flag("attention_bias", False)
    attention = read_attention(
        config, default_kv_heads=4, default_head_dim=128, qkv_bias=bias, output_bias=bias, has_head_norm=True
    )
    router = read_router(
        config,
        default_experts=128,
        default_top_k=8,
        normalizes=config.flag("norm_topk_prob", False),
    )
    dense = read_mlp(config, default_inner=6144)
    every, without = config.integer("decoder_sparse_step", 1), _read_dense_layers(config)
    layers = with_mixtures(
        repeat_layer(config, attention, dense),
        read_mixture(config, router, default_inner=768),
        lambda number: number in without or (number + 1) % every != 0,
    )
    window = window_if_switched_on(config)
    return layers if window is None else with_windows(layers, window)


def _read_dense_layers(config: ConfigFile) -> list[int]:
    given = config.raw.get("mlp_only_layers")
    numbers = cast("list[Any]", given) if isinstance(given, list) else []
    if given is not None and not (isinstance(given, list) and all(isinstance(each, int) for each in numbers)):
        raise config.error(f"mlp_only_layers is {given!r}, not a list of layers")
    return numbers


QWEN3_MOE = Family(("Qwen3MoeForCausalLM",), _describe, default_max_position=32768)
