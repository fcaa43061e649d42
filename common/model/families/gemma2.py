"""Gemma 2: norms before and after, weights of norms less one, soft caps of scores and logits, a sliding window in every
second layer."""

from __future__ import annotations

from dataclasses import replace

from common.model.config_file import ConfigFile
from common.model.description import USUAL_NAMES, EndsDescription, LayerDescription, NormDescription
from common.model.families.base import Family, read_attention, read_mlp, read_norm, repeated
from common.model.families.windows import read_layer_types, window_by_default, with_windows
from common.model.rope import read_rope

GEMMA_NAMES = replace(USUAL_NAMES, mlp_norm="pre_feedforward_layernorm")
GEMMA_KEYS = {"hidden_act": "hidden_activation"}
LOGITS_SOFT_CAP = "final_logit_softcapping"


def read_gemma_layer(
    config: ConfigFile, *, head_norm: NormDescription | None = None, soft_cap: float | None = None
) -> LayerDescription:
    """A layer without a rotary embedding and a sliding window, as Gemma 2 and 3 have it."""
    if config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention is not supported")
    bias = config.flag("attention_bias", False)
    attention = replace(
        read_attention(config, default_kv_heads=4, default_head_dim=256, qkv_bias=bias, output_bias=bias),
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        head_norm=head_norm,
        soft_cap=soft_cap,
    )
    mlp = read_mlp(config, default_activation="gelu_pytorch_tanh")
    return LayerDescription(attention, mlp, read_gemma_norm(config), norm_at="both")


def read_gemma_norm(config: ConfigFile) -> NormDescription:
    """An RMS norm, whose stored weights are less one."""
    return replace(read_norm(config), weight_offset=1.0)


def read_gemma_ends(config: ConfigFile, logits_soft_cap: float | None = None) -> EndsDescription:
    """Embeddings times the square root of their width."""
    return EndsDescription(
        embedding_multiplier=config.integer("hidden_size") ** 0.5,
        is_multiplier_rounded=True,
        logits_soft_cap=logits_soft_cap,
    )


def read_soft_cap(config: ConfigFile, key: str, default: float | None = None) -> float | None:
    """Null means none, a missing key `default`."""
    return None if config.raw.get(key, default) is None else config.number(key, default)


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    soft_cap = read_soft_cap(config, "attn_logit_softcapping", 50.0)
    layer = replace(read_gemma_layer(config, soft_cap=soft_cap), rope=read_rope(config))
    types = read_layer_types(config, lambda number: number % 2 == 0)
    return with_windows(repeated(config, layer), window_by_default(config), types)


GEMMA2 = Family(
    ("Gemma2ForCausalLM",),
    _describe,
    default_max_position=8192,
    weight_names=GEMMA_NAMES,
    describe_ends=lambda config: read_gemma_ends(config, read_soft_cap(config, LOGITS_SOFT_CAP, 30.0)),
    default_tied=True,
    config_keys=GEMMA_KEYS,
)
