"""Mistral, and Mixtral with a mixture of experts in every layer: as Llama, without biases. Mistral has a sliding window in all
layers, or in those that `layer_types` names (Ministral)."""

from __future__ import annotations

from common.model.config_file import ConfigFile
from common.model.description import ExpertNames, LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, repeat_layer
from common.model.families.mixtures import read_mixture, read_router
from common.model.families.windows import read_layer_types, window_by_default, window_if_given, with_windows

_MIXTRAL_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{expert}.w1",
    up="block_sparse_moe.experts.{expert}.w3",
    down="block_sparse_moe.experts.{expert}.w2",
)


def _describe_mistral(config: ConfigFile) -> tuple[LayerDescription, ...]:
    layers = repeat_layer(config, read_attention(config, default_kv_heads=8), read_mlp(config))
    return with_windows(layers, window_by_default(config), read_layer_types(config, lambda number: True))


def _describe_mixtral(config: ConfigFile) -> tuple[LayerDescription, ...]:
    router = read_router(config, default_experts=8, default_top_k=2, normalizes=True)
    mixture = read_mixture(config, router, inner_key="intermediate_size", default_inner=14336, names=_MIXTRAL_NAMES)
    layers = repeat_layer(config, read_attention(config, default_kv_heads=8), mixture)
    return with_windows(layers, window_if_given(config))


MISTRAL = Family(("MistralForCausalLM",), _describe_mistral, default_max_position=131072)
MIXTRAL = Family(
    ("MixtralForCausalLM",), _describe_mixtral, default_max_position=131072, config_defaults={"rms_norm_eps": 1e-5}
)
