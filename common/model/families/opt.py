"""OPT, those with norms before attention and MLP (all but 350m): learned positions, layer norms, a plain MLP."""

from __future__ import annotations

from common.model.config_file import ConfigFile
from common.model.description import (
    EndsDescription,
    LayerDescription,
    NormDescription,
    PositionsDescription,
    WeightNames,
)
from common.model.families.base import Family, read_attention, read_mlp, repeated

_MAX_POSITION = 2048
_FIRST_ROW = 2
"""Row of position 0: those before are of padding."""
_NAMES = WeightNames(
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


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    hidden = config.integer("hidden_size")
    if config.integer("word_embed_proj_dim", hidden) != hidden:
        raise config.error("word_embed_proj_dim differs from hidden_size, and projected embeddings are not supported")
    if not config.flag("do_layer_norm_before", True):
        raise config.error("do_layer_norm_before false, norms of the sums, is not supported")
    if config.flag("_remove_final_layer_norm", False) or not config.flag("layer_norm_elementwise_affine", True):
        raise config.error("a model without final norm or without weights of norms is not supported")
    bias = config.flag("enable_bias", True)
    mlp = read_mlp(config, bias=bias, kind="plain", default_activation="relu")
    attention = read_attention(config, bias=bias)
    return repeated(config, LayerDescription(attention, mlp, NormDescription(1e-5, "layer")))


def _describe_ends(config: ConfigFile) -> EndsDescription:
    rows = config.integer("max_position_embeddings", _MAX_POSITION) + _FIRST_ROW
    return EndsDescription(positions=PositionsDescription(rows, _FIRST_ROW))


OPT = Family(
    ("OPTForCausalLM",),
    _describe,
    default_max_position=_MAX_POSITION,
    weight_names=_NAMES,
    describe_ends=_describe_ends,
    default_tied=True,
    config_keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
)
