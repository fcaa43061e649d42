"""Granite 3, dense: as Llama, with factors of embeddings, attention, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from common.model.config_file import ConfigFile
from common.model.description import EndsDescription, LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, repeat_layer


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    bias = config.flag("attention_bias", False)
    attention = read_attention(config, qkv_bias=bias, output_bias=bias)
    attention = replace(attention, scale=config.number("attention_multiplier", 1.0))
    layers = repeat_layer(config, attention, read_mlp(config, bias=config.flag("mlp_bias", False)))
    return tuple(replace(layer, residual_multiplier=config.number("residual_multiplier", 1.0)) for layer in layers)


def _describe_ends(config: ConfigFile) -> EndsDescription:
    return EndsDescription(
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0),
    )


GRANITE = Family(("GraniteForCausalLM",), _describe, default_max_position=2048, describe_ends=_describe_ends)
