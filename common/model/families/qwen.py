"""Qwen2 and Qwen2.5, dense, the text part of Qwen2.5-VL, and Qwen3, dense and with a mixture of experts: as Llama, with a
sliding window in later layers where windows are switched on. Qwen2 has biases on q, k and v only, Qwen3 an RMS norm over each
head of q and k before rope."""

from __future__ import annotations

from dataclasses import replace

from common.model.config_file import ConfigFile, as_list
from common.model.description import USUAL_NAMES, LayerDescription, MultiHeadDescription
from common.model.families.base import Family, read_attention, read_mlp, read_norm, repeat_layer, repeated
from common.model.families.mixtures import read_mixture, read_router, with_mixtures
from common.model.families.windows import window_if_switched_on, with_windows, with_windows_in_later_layers
from common.model.rope import read_rope


def _describe_qwen2(config: ConfigFile) -> tuple[LayerDescription, ...]:
    layers = repeat_layer(config, read_attention(config, default_kv_heads=32, qkv_bias=True), read_mlp(config))
    return with_windows_in_later_layers(config, layers, default_first=28)


def _describe_qwen2_5_vl(config: ConfigFile) -> tuple[LayerDescription, ...]:
    """The language model of Qwen2.5-VL. Multimodal rope gives tokens of text the same angles as plain rope."""
    attention = read_attention(config, default_kv_heads=8, qkv_bias=True)
    layer = LayerDescription(attention, read_mlp(config), read_norm(config, 1e-5), read_rope(config, 1e6))
    return with_windows_in_later_layers(config, repeated(config, layer), default_first=80)


def _read_qwen3_attention(config: ConfigFile, default_kv_heads: int) -> MultiHeadDescription:
    bias = config.flag("attention_bias", False)
    return read_attention(
        config, default_kv_heads=default_kv_heads, default_head_dim=128, bias=bias, has_head_norm=True
    )


def _describe_qwen3(config: ConfigFile) -> tuple[LayerDescription, ...]:
    layers = repeat_layer(config, _read_qwen3_attention(config, 32), read_mlp(config))
    return with_windows_in_later_layers(config, layers, default_first=28)


def _describe_qwen3_moe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    """Experts in all layers but those that config.json names."""
    normalizes = config.flag("norm_topk_prob", False)
    router = read_router(config, default_experts=128, default_top_k=8, normalizes=normalizes)
    dense = read_mlp(config, default_inner=6144)
    every, without = config.integer("decoder_sparse_step", 1), _read_dense_layers(config)
    layers = with_mixtures(
        repeat_layer(config, _read_qwen3_attention(config, 4), dense),
        read_mixture(config, router, default_inner=768),
        lambda number: number in without or (number + 1) % every != 0,
    )
    return with_windows(layers, window_if_switched_on(config))


def _read_dense_layers(config: ConfigFile) -> list[int]:
    given = config.raw.get("mlp_only_layers")
    numbers = as_list(given)
    if given is not None and (numbers != given or not all(isinstance(each, int) for each in numbers)):
        raise config.error(f"mlp_only_layers is {given!r}, not a list of layers")
    return numbers


QWEN2 = Family(("Qwen2ForCausalLM",), _describe_qwen2, default_max_position=32768)
QWEN2_5_VL_TEXT_PART = Family(
    ("Qwen2_5_VLForConditionalGeneration",),
    _describe_qwen2_5_vl,
    default_max_position=32768,
    weight_names=replace(USUAL_NAMES, other_beginnings=(("model.", "model.language_model."),)),
    nested_config="text_config",
)
QWEN3 = Family(("Qwen3ForCausalLM",), _describe_qwen3, default_max_position=32768)
QWEN3_MOE = Family(("Qwen3MoeForCausalLM",), _describe_qwen3_moe, default_max_position=32768)
