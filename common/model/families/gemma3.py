"""Gemma 3, text only: norms before and after, weights of norms less one, two bases of rope; contexts are limited to the
window that most of its layers have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from common.model.config_file import ConfigFile
from common.model.description import USUAL_NAMES, EndsDescription, LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, read_norm, read_window
from common.model.rope import RopeConfig, read_rope

_FULL, _SLIDING = "full_attention", "sliding_attention"


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    if config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention is not supported")
    bias, norm = config.flag("attention_bias", False), replace(read_norm(config), weight_offset=1.0)
    attention = replace(
        read_attention(config, default_kv_heads=4, default_head_dim=256, qkv_bias=bias, output_bias=bias),
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        head_norm=norm,
        soft_cap=_soft_cap(config, "attn_logit_softcapping"),
    )
    mlp = read_mlp(config, default_activation="gelu_pytorch_tanh")
    rope = {_FULL: read_rope(config, 1e6, _FULL), _SLIDING: _local_rope(config)}
    return tuple(
        LayerDescription(attention, mlp, norm, rope[kind], norm_at="both")
        for kind in _layer_types(config, config.integer("num_hidden_layers"))
    )


def _local_rope(config: ConfigFile) -> RopeConfig:
    given = config.raw.get("rope_parameters")
    if isinstance(given, dict) and _SLIDING in given:
        return read_rope(config, of_layers=_SLIDING)
    return RopeConfig(config.number("rope_local_base_freq", 10000.0))


def _layer_types(config: ConfigFile, num_layers: int) -> list[str]:
    given = config.raw.get("layer_types")
    if given is None:
        every = config.integer("sliding_window_pattern", 6)
        return [_SLIDING if (number + 1) % every else _FULL for number in range(num_layers)]
    types = cast("list[Any]", given) if isinstance(given, list) else []
    if len(types) != num_layers or not set(types) <= {_FULL, _SLIDING}:
        raise config.error(f"layer_types is not a list of {num_layers} times {_FULL} or {_SLIDING}")
    return types


def _soft_cap(config: ConfigFile, key: str) -> float | None:
    return None if config.raw.get(key) is None else config.number(key)


def _describe_ends(config: ConfigFile) -> EndsDescription:
    return EndsDescription(
        embedding_multiplier=config.integer("hidden_size") ** 0.5,
        is_multiplier_rounded=True,
        logits_soft_cap=_soft_cap(config, "final_logit_softcapping"),
    )


GEMMA3 = Family(
    ("Gemma3ForCausalLM",),
    _describe,
    default_max_position=131072,
    read_window=read_window,
    weight_names=replace(USUAL_NAMES, mlp_norm="pre_feedforward_layernorm"),
    describe_ends=_describe_ends,
    default_tied=True,
    config_keys={"hidden_act": "hidden_activation"},
)
