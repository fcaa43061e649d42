"""GPT-2 and OPT (but 350m, whose norms are behind attention and MLP): learned positions, layer norms, a plain MLP. GPT-2's
weights are merged and stored [in, out]."""

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

_OPT_FIRST_ROW = 2
"""Row of position 0: those before are of padding."""
_GPT2_NAMES = WeightNames(
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
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
_OPT_NAMES = WeightNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layer="model.decoder.layers.{number}",
    final_norm="model.decoder.final_layer_norm",
    input_norm="self_attn_layer_norm",
    output="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up="fc1",
    down="fc2",
)


def _describe_gpt2(config: ConfigFile) -> tuple[LayerDescription, ...]:
    if config.flag("scale_attn_by_inverse_layer_idx", False):
        raise config.error("scale_attn_by_inverse_layer_idx is not supported")
    attention = read_attention(config, bias=True)
    if not config.flag("scale_attn_weights", True):
        attention = replace(attention, scale=1.0)
    inner = config.integer("intermediate_size", 4 * config.integer("hidden_size"))
    mlp = read_mlp(config, bias=True, kind="plain", default_activation="gelu_new", default_inner=inner)
    norm = NormDescription(config.number("layer_norm_epsilon", 1e-5), "layer")
    return repeated(config, LayerDescription(attention, mlp, norm))


def _describe_opt(config: ConfigFile) -> tuple[LayerDescription, ...]:
    hidden = config.integer("hidden_size")
    if config.integer("word_embed_proj_dim", hidden) != hidden:
        raise config.error("word_embed_proj_dim differs from hidden_size, and projected embeddings are not supported")
    if not config.flag("do_layer_norm_before", True):
        raise config.error("do_layer_norm_before false, norms of the sums, is not supported")
    if config.flag("_remove_final_layer_norm", False) or not config.flag("layer_norm_elementwise_affine", True):
        raise config.error("a model without final norm or without weights of norms is not supported")
    bias = config.flag("enable_bias", True)
    mlp = read_mlp(config, bias=bias, kind="plain", default_activation="relu")
    return repeated(config, LayerDescription(read_attention(config, bias=bias), mlp, NormDescription(1e-5, "layer")))


def _describe_ends(config: ConfigFile, default_max_position: int, first_row: int = 0) -> EndsDescription:
    rows = config.integer("max_position_embeddings", default_max_position) + first_row
    return EndsDescription(positions=PositionsDescription(rows, first_row))


GPT2 = Family(
    ("GPT2LMHeadModel",),
    _describe_gpt2,
    default_max_position=1024,
    weight_names=_GPT2_NAMES,
    describe_ends=lambda config: _describe_ends(config, 1024),
    default_tied=True,
    config_keys=_GPT2_KEYS,
)
OPT = Family(
    ("OPTForCausalLM",),
    _describe_opt,
    default_max_position=2048,
    weight_names=_OPT_NAMES,
    describe_ends=lambda config: _describe_ends(config, 2048, _OPT_FIRST_ROW),
    default_tied=True,
    config_keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
)
