"""DeepSeek V2 (Lite), V3, R1 and Kimi K2: latent attention. The rotary embedding's YaRN also scales the scores. No torch."""

from __future__ import annotations

import math
from functools import partial

from common.model.config_file import ConfigFile
from common.model.description import LatentDescription, LayerDescription, MlpDescription, NormDescription
from common.model.families.base import Family, read_mlp, read_norm
from common.model.rope import read_rope

_LATENT_EPS = 1e-6
"""Of the norms of latents, whatever config.json says of the others."""


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


def _read_mlp(config: ConfigFile, number: int) -> MlpDescription:
    """The MLP of a layer: the first ones are dense."""
    return read_mlp(config, bias=config.flag("mlp_bias", False))


def _describe(config: ConfigFile, *, chooses_pairs: bool) -> tuple[LayerDescription, ...]:
    """`chooses_pairs`: whether config.json can say that rope rotates halves of heads."""
    adjacent = config.flag("rope_interleave", True) if chooses_pairs else True
    attention = _read_latent_attention(config, has_adjacent_pairs=adjacent)
    norm, rope = read_norm(config), read_rope(config)
    return tuple(
        LayerDescription(attention, _read_mlp(config, number), norm, rope) for number in range(config.num_layers())
    )


DEEPSEEK_V2 = Family(("DeepseekV2ForCausalLM",), partial(_describe, chooses_pairs=False), default_max_position=2048)
DEEPSEEK_V3 = Family(("DeepseekV3ForCausalLM",), partial(_describe, chooses_pairs=True), default_max_position=4096)
