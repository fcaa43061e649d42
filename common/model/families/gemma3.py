"""Gemma 3, and the text part of its models that also take images: as Gemma 2, with norms of heads instead of soft caps, a
sliding window in five layers of six, and another base of rope in these."""

from __future__ import annotations

from dataclasses import replace

from common.model.config_file import ConfigFile
from common.model.description import LayerDescription
from common.model.families.base import Family
from common.model.families.gemma2 import (
    GEMMA_KEYS,
    GEMMA_NAMES,
    LOGITS_SOFT_CAP,
    read_gemma_ends,
    read_gemma_layer,
    read_gemma_norm,
    read_soft_cap,
)
from common.model.families.windows import FULL, SLIDING, read_layer_types, window_by_default, with_windows
from common.model.rope import RopeConfig, read_rope


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    layer = read_gemma_layer(config, head_norm=read_gemma_norm(config))
    every = config.integer("sliding_window_pattern", 6)
    types = read_layer_types(config, lambda number: (number + 1) % every != 0)
    rope = _ropes(config)
    return with_windows([replace(layer, rope=rope[kind]) for kind in types], window_by_default(config), types)


def _ropes(config: ConfigFile) -> dict[str, RopeConfig]:
    """By kind of layer. As in transformers, `rope_scaling` is of layers without a window."""
    given = config.object("rope_parameters")
    full, local = (config.object(kind, within=given) for kind in (FULL, SLIDING))
    return {
        FULL: read_rope(config, 1e6, {**full, **config.object("rope_scaling")}),
        SLIDING: read_rope(config.renamed({"rope_theta": "rope_local_base_freq"}), 1e4, local),
    }


GEMMA3 = Family(
    ("Gemma3ForCausalLM",),
    _describe,
    default_max_position=131072,
    weight_names=GEMMA_NAMES,
    describe_ends=lambda config: read_gemma_ends(config, read_soft_cap(config, LOGITS_SOFT_CAP)),
    default_tied=True,
    config_keys=GEMMA_KEYS,
)
_PREFIX = "language_model."
GEMMA3_TEXT_PART = replace(
    GEMMA3,
    architectures=("Gemma3ForConditionalGeneration",),
    nested_config="text_config",
    describe_ends=read_gemma_ends,
    config_defaults={"num_attention_heads": 8, "vocab_size": 262208},
    weight_names=replace(
        GEMMA_NAMES,
        embedding=_PREFIX + GEMMA_NAMES.embedding,
        layer=_PREFIX + GEMMA_NAMES.layer,
        final_norm=_PREFIX + GEMMA_NAMES.final_norm,
        lm_head=_PREFIX + GEMMA_NAMES.lm_head,
        other_beginnings=(
            ("language_model.model.", "model.language_model."),
            ("language_model.model.", "language_model."),
        ),
    ),
)
