"""Granite 3, mixture of experts: as Granite, with experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from common.model.config_file import ConfigFile
from common.model.description import ExpertNames, LayerDescription
from common.model.families.granite import GRANITE
from common.model.families.mixtures import read_mixture, read_router

_NAMES = ExpertNames(
    router="block_sparse_moe.router.layer",
    stacked_gate="block_sparse_moe.input_linear.weight",
    stacked_up="block_sparse_moe.input_linear.weight",
    stacked_down="block_sparse_moe.output_linear.weight",
)


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    router = read_router(config, "softmax_of_chosen", default_experts=8, default_top_k=2)
    mixture = read_mixture(config, router, inner_key="intermediate_size", names=_NAMES)
    return tuple(replace(layer, mlp=mixture) for layer in GRANITE.describe(config))


GRANITE_MOE = replace(GRANITE, architectures=("GraniteMoeForCausalLM",), describe=_describe)
