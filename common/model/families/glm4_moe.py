"""GLM-4.5 and 4.6: rope of half of each head, a few dense layers, then experts chosen in groups, and shared ones."""

from __future__ import annotations

from common.model.config_file import ConfigFile
from common.model.description import LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, read_norm, repeated
from common.model.families.mixtures import read_biased_router, read_mixture, with_mixtures
from common.model.rope import read_rope


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    attention = read_attention(
        config,
        default_kv_heads=8,
        qkv_bias=config.flag("attention_bias", False),
        has_head_norm=config.flag("use_qk_norm", False),
    )
    dense = read_mlp(config, default_inner=10944)
    router = read_biased_router(config, default_experts=128)
    mixture = read_mixture(config, router, default_inner=1408, default_shared=1)
    rope = read_rope(config, default_in_part=True)
    layer = LayerDescription(attention, dense, read_norm(config), rope)
    first = config.count("first_k_dense_replace", 1)
    return with_mixtures(repeated(config, layer), mixture, lambda number: number < first)


GLM4_MOE = Family(
    ("Glm4MoeForCausalLM",),
    _describe,
    default_max_position=131072,
    config_defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    has_mtp=True,
)
