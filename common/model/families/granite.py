"""Granite 3, dense and with experts in every layer: as Llama, with factors of embeddings, attention, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from common.model.config_file import ConfigFile
from common.model.description import EndsDescription, ExpertNames, LayerDescription
from common.model.families.base import Family
from common.model.families.llama import LLAMA
from common.model.families.mixtures import read_mixture, read_router

_EXPERT_NAMES = ExpertNames(
    router="block_sparse_moe.router.layer",
    stacked_gate="block_sparse_moe.input_linear.weight",
    stacked_up="block_sparse_moe.input_linear.weight",
    stacked_down="block_sparse_moe.output_linear.weight",
)


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    scale, multiplier = (config.number(f"{what}_multiplier", 1.0) for what in ("attention", "residual"))
    return tuple(
        replace(layer, attention=replace(layer.attention, scale=scale), residual_multiplier=multiplier)
        for layer in LLAMA.describe(config)
    )


def _describe_with_experts(config: ConfigFile) -> tuple[LayerDescription, ...]:
    router = read_router(config, "softmax_of_chosen", default_experts=8, default_top_k=2)
    mixture = read_mixture(config, router, inner_key="intermediate_size", names=_EXPERT_NAMES)
    return tuple(replace(layer, mlp=mixture) for layer in _describe(config))


def _describe_ends(config: ConfigFile) -> EndsDescription:
    return EndsDescription(
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0),
    )


GRANITE = Family(("GraniteForCausalLM",), _describe, default_max_position=2048, describe_ends=_describe_ends)
GRANITE_MOE = replace(GRANITE, architectures=("GraniteMoeForCausalLM",), describe=_describe_with_experts)
