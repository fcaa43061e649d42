"""Mixtral: as Mistral, with a mixture of experts in every layer."""

from __future__ import annotations

from common.model.config_file import ConfigFile
from common.model.description import ExpertNames, LayerDescription
from common.model.families.base import Family, read_attention, repeat_layer
from common.model.families.mixtures import read_mixture, read_router
from common.model.families.windows import window_if_given, with_windows

_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{expert}.w1",
    up="block_sparse_moe.experts.{expert}.w3",
    down="block_sparse_moe.experts.{expert}.w2",
)


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    router = read_router(config, default_experts=8, default_top_k=2, normalizes=True)
    mixture = read_mixture(config, router, inner_key="intermediate_size", default_inner=14336, names=_NAMES)
    layers = repeat_layer(config, read_attention(config, default_kv_heads=8), mixture)
    window = window_if_given(config)
    return layers if window is None else with_windows(layers, window)


MIXTRAL = Family(
    ("MixtralForCausalLM",), _describe, default_max_position=131072, config_defaults={"rms_norm_eps": 1e-5}
)
