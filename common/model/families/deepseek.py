"""DeepSeek V2 (Lite), V3, R1 and Kimi K2: latent attention, a few dense layers, then experts chosen in groups, and shared
ones. YaRN also scales the scores of attention. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from common.model.config_file import ConfigFile
from common.model.description import LayerDescription, MixtureDescription, NormDescription
from common.model.families.base import Family, read_mlp, read_norm, repeated
from common.model.families.mixtures import (
    read_biased_router,
    read_mixture,
    read_router,
    with_groups,
    with_mixtures,
)
from common.model.latent_description import LatentDescription
from common.model.rope import read_rope

_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents; config.json has only that of the other norms."""


def _score_factor(config: ConfigFile) -> float:
    """The square of YaRN's `mscale_all_dim` at the context's extension, by which scores grow."""
    scaling = config.object("rope_scaling") or config.object("rope_parameters")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    factor = config.number("factor", within=scaling)
    return (0.1 * config.number("mscale_all_dim", within=scaling) * math.log(max(1.0, factor)) + 1.0) ** 2


def _read_latent_attention(config: ConfigFile, *, has_adjacent_pairs: bool) -> LatentDescription:
    if config.flag("attention_bias", False):
        raise config.error("attention_bias is not supported with latent attention")
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise config.error(f"qk_rope_head_dim {rope_dim} is odd, which rotary embeddings cannot be")
    return LatentDescription(
        num_heads=config.integer("num_attention_heads"),
        latent_dim=config.integer("kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        v_head_dim=config.integer("v_head_dim"),
        scale=_score_factor(config) / math.sqrt(nope_dim + rope_dim),
        norm=NormDescription(_LATENT_EPS),
        q_latent_dim=None if config.raw.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        has_adjacent_pairs=has_adjacent_pairs,
    )


def _describe(
    config: ConfigFile, read_mixture_of: Callable[[ConfigFile], MixtureDescription], *, has_adjacent_pairs: bool
) -> tuple[LayerDescription, ...]:
    if config.integer("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq must be 1: dense layers among the mixtures are not supported")
    attention = _read_latent_attention(config, has_adjacent_pairs=has_adjacent_pairs)
    dense = read_mlp(config, bias=config.flag("mlp_bias", False))
    layers = repeated(config, LayerDescription(attention, dense, read_norm(config), read_rope(config)))
    first = config.count("first_k_dense_replace", 0)
    if first >= len(layers):
        return layers
    return with_mixtures(layers, read_mixture_of(config), lambda number: number < first)


def _read_v2_mixture(config: ConfigFile) -> MixtureDescription:
    """Softmax scores; the large model scores groups by their best expert, the small one has none."""
    router = read_router(config)
    method = config.raw.get("topk_method", "greedy")
    if method == "group_limited_greedy":
        router = with_groups(config, router, score_of=1)
    elif method == "greedy":
        router = replace(router, scaling=config.number("routed_scaling_factor", 1.0))
    else:
        raise config.error(f"topk_method {method!r} is not supported; supported: greedy, group_limited_greedy")
    return read_mixture(config, router, default_shared=2)


def _read_v3_mixture(config: ConfigFile) -> MixtureDescription:
    router = read_biased_router(config, default_experts=256, default_groups=8, default_kept=4)
    return read_mixture(config, router, default_inner=2048, default_shared=1)


def _describe_v2(config: ConfigFile) -> tuple[LayerDescription, ...]:
    return _describe(config, _read_v2_mixture, has_adjacent_pairs=True)


def _describe_v3(config: ConfigFile) -> tuple[LayerDescription, ...]:
    return _describe(config, _read_v3_mixture, has_adjacent_pairs=config.flag("rope_interleave", True))


DEEPSEEK_V2 = Family(("DeepseekV2ForCausalLM",), _describe_v2, default_max_position=2048)
DEEPSEEK_V3 = Family(
    ("DeepseekV3ForCausalLM",),
    _describe_v3,
    default_max_position=4096,
    config_defaults={"first_k_dense_replace": 3, "routed_scaling_factor": 2.5},
    has_mtp=True,
)
