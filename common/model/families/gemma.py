"""Gemma 2 and 3, and the text part of Gemma 3's models that also take images: norms before and after, weights of norms less
one. Gemma 2 has soft caps of scores and logits, and a sliding window in every second layer; Gemma 3 norms of heads instead of
soft caps, a sliding window in five layers of six, and another base of rope in these."""

from __future__ import annotations

from dataclasses import replace

from common.model.config_file import ConfigFile
from common.model.description import USUAL_NAMES, EndsDescription, LayerDescription, NormDescription
from common.model.families.base import Family, read_attention, read_mlp, read_norm, repeated
from common.model.families.windows import FULL, SLIDING, read_layer_types, window_by_default, with_windows
from common.model.rope import RopeConfig, read_rope

_NAMES = replace(USUAL_NAMES, mlp_norm="pre_feedforward_layernorm")
_LOGITS_SOFT_CAP = "final_logit_softcapping"


def _read_layer(
    config: ConfigFile, *, head_norm: NormDescription | None = None, soft_cap: float | None = None
) -> LayerDescription:
    """A layer without a rotary embedding and a sliding window."""
    if config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention is not supported")
    attention = replace(
        read_attention(config, default_kv_heads=4, default_head_dim=256, bias=config.flag("attention_bias", False)),
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        head_norm=head_norm,
        soft_cap=soft_cap,
    )
    mlp = read_mlp(config, default_activation="gelu_pytorch_tanh")
    return LayerDescription(attention, mlp, _read_norm(config), norm_at="both")


def _read_norm(config: ConfigFile) -> NormDescription:
    """An RMS norm, whose stored weights are less one."""
    return replace(read_norm(config), weight_offset=1.0)


def _read_ends(config: ConfigFile, logits_soft_cap: float | None = None) -> EndsDescription:
    """Embeddings times the square root of their width."""
    return EndsDescription(
        embedding_multiplier=config.integer("hidden_size") ** 0.5,
        is_multiplier_rounded=True,
        logits_soft_cap=logits_soft_cap,
    )


def _read_soft_cap(config: ConfigFile, key: str, default: float | None = None) -> float | None:
    """Null means none, a missing key `default`."""
    return None if config.raw.get(key, default) is None else config.number(key, default)


def _describe_gemma2(config: ConfigFile) -> tuple[LayerDescription, ...]:
    soft_cap = _read_soft_cap(config, "attn_logit_softcapping", 50.0)
    layer = replace(_read_layer(config, soft_cap=soft_cap), rope=read_rope(config))
    types = read_layer_types(config, lambda number: number % 2 == 0)
    return with_windows(repeated(config, layer), window_by_default(config), types)


def _describe_gemma3(config: ConfigFile) -> tuple[LayerDescription, ...]:
    layer = _read_layer(config, head_norm=_read_norm(config))
    every = config.integer("sliding_window_pattern", 6)
    types = read_layer_types(config, lambda number: (number + 1) % every != 0)
    rope = _gemma3_ropes(config)
    return with_windows([replace(layer, rope=rope[kind]) for kind in types], window_by_default(config), types)


def _gemma3_ropes(config: ConfigFile) -> dict[str, RopeConfig]:
    """By kind of layer. As in transformers, `rope_scaling` is of layers without a window."""
    given = config.object("rope_parameters")
    full, local = (config.object(kind, within=given) for kind in (FULL, SLIDING))
    return {
        FULL: read_rope(config, 1e6, {**full, **config.object("rope_scaling")}),
        SLIDING: read_rope(config.renamed({"rope_theta": "rope_local_base_freq"}), 1e4, local),
    }


GEMMA2 = Family(
    ("Gemma2ForCausalLM",),
    _describe_gemma2,
    default_max_position=8192,
    weight_names=_NAMES,
    describe_ends=lambda config: _read_ends(config, _read_soft_cap(config, _LOGITS_SOFT_CAP, 30.0)),
    default_tied=True,
    config_keys={"hidden_act": "hidden_activation"},
)
GEMMA3 = replace(
    GEMMA2,
    architectures=("Gemma3ForCausalLM",),
    describe=_describe_gemma3,
    default_max_position=131072,
    describe_ends=lambda config: _read_ends(config, _read_soft_cap(config, _LOGITS_SOFT_CAP)),
)
_PREFIX = "language_model."
GEMMA3_TEXT_PART = replace(
    GEMMA3,
    architectures=("Gemma3ForConditionalGeneration",),
    nested_config="text_config",
    describe_ends=_read_ends,
    config_defaults={"num_attention_heads": 8, "vocab_size": 262208},
    weight_names=replace(
        _NAMES,
        embedding=_PREFIX + _NAMES.embedding,
        layer=_PREFIX + _NAMES.layer,
        final_norm=_PREFIX + _NAMES.final_norm,
        lm_head=_PREFIX + _NAMES.lm_head,
        other_beginnings=(
            ("language_model.model.", "model.language_model."),
            ("language_model.model.", "language_model."),
        ),
    ),
)
