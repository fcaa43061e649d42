"""GPT-2: learned positions, layer norms, a plain MLP, merged weights that are stored [in, out]."""

from __future__ import annotations

from dataclasses import replace

from common.model.config_file import ConfigFile
from common.model.description import (
    EndsDescription,
    LayerDescription,
    NormDescription,
    PositionsDescription,
    WeightNames,
)
from common.model.families.base import Family, read_attention, read_mlp, repeated

_MAX_POSITION = 1024
_NAMES = WeightNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{number}",
    final_norm="transformer.ln_f",
    input_norm="ln_1",
    attention="attn",
    q="attn.c_attn",
    k="attn.c_attn",
    v="attn.c_attn",
    output="attn.c_proj",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
    is_transposed=True,
)
_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    if config.flag("scale_attn_by_inverse_layer_idx", False):
        raise config.error("scale_attn_by_inverse_layer_idx is not supported")
    attention = read_attention(config, bias=True)
    if not config.flag("scale_attn_weights", True):
        attention = replace(attention, scale=1.0)
    inner = config.integer("intermediate_size", 4 * config.integer("hidden_size"))
    mlp = read_mlp(config, bias=True, kind="plain", default_activation="gelu_new", default_inner=inner)
    norm = NormDescription(config.number("layer_norm_epsilon", 1e-5), "layer")
    return repeated(config, LayerDescription(attention, mlp, norm))


def _describe_ends(config: ConfigFile) -> EndsDescription:
    return EndsDescription(positions=PositionsDescription(config.integer("max_position_embeddings", _MAX_POSITION)))


GPT2 = Family(
    ("GPT2LMHeadModel",),
    _describe,
    default_max_position=_MAX_POSITION,
    weight_names=_NAMES,
    describe_ends=_describe_ends,
    default_tied=True,
    config_keys=_KEYS,
)
