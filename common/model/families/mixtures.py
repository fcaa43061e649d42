"""Mixtures of experts, as config.json says them. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from common.model.config_file import ConfigFile
from common.model.description import (
    USUAL_EXPERT_NAMES,
    ExpertNames,
    LayerDescription,
    MixtureDescription,
    RouterDescription,
)
from common.model.families.base import read_activation

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of the number of experts: those of published checkpoints, and those that versions of transformers write."""
_MOST_EXPERTS = 10_000


def read_router(
    config: ConfigFile,
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax",
    *,
    default_experts: int | None = None,
    default_top_k: int | None = None,
    normalizes: bool = False,
    has_bias: bool = False,
) -> RouterDescription:
    """A router without groups and selection bias."""
    key = next((key for key in _EXPERTS if config.raw.get(key) is not None), _EXPERTS[0])
    num_experts = config.integer(key, default_experts, most=_MOST_EXPERTS)
    top_k = config.integer("num_experts_per_tok", default_top_k)
    if top_k > num_experts:
        raise config.error(f"num_experts_per_tok {top_k} is more than the {num_experts} experts")
    return RouterDescription(num_experts, top_k, scores, normalizes, has_bias=has_bias)


def read_biased_router(
    config: ConfigFile, default_experts: int, default_groups: int = 1, default_kept: int = 1
) -> RouterDescription:
    """The router of DeepSeek-V3: sigmoid scores, a selection bias, and groups scored by their two best experts."""
    normalizes = config.flag("norm_topk_prob", True)
    router = read_router(config, "sigmoid", default_experts=default_experts, default_top_k=8, normalizes=normalizes)
    router = replace(router, has_selection_bias=True)
    return with_groups(config, router, score_of=2, default_groups=default_groups, default_kept=default_kept)


def with_groups(
    config: ConfigFile, router: RouterDescription, *, score_of: int, default_groups: int = 1, default_kept: int = 1
) -> RouterDescription:
    """`router` with the groups of `n_group` and `topk_group`, and the factor `routed_scaling_factor`.

    `score_of`: `RouterDescription.group_score_of`.
    """
    groups, kept = config.integer("n_group", default_groups), config.integer("topk_group", default_kept)
    experts = router.num_experts
    if experts % groups:
        raise config.error(f"n_group {groups} does not divide the {experts} experts")
    if kept > groups:
        raise config.error(f"topk_group {kept} is more than n_group {groups}")
    if groups > 1 and score_of > experts // groups:
        raise config.error(f"n_group {groups} leaves {experts // groups} experts in a group, which needs {score_of}")
    if router.top_k > kept * (experts // groups):
        raise config.error(
            f"num_experts_per_tok {router.top_k} is more than the {kept * (experts // groups)} experts of "
            f"topk_group {kept} groups"
        )
    scaling = config.number("routed_scaling_factor", 1.0)
    return replace(router, num_groups=groups, groups_kept=kept, group_score_of=score_of, scaling=scaling)


def read_mixture(
    config: ConfigFile,
    router: RouterDescription,
    *,
    inner_key: str = "moe_intermediate_size",
    default_inner: int | None = None,
    default_shared: int = 0,
    bias: bool = False,
    names: ExpertNames = USUAL_EXPERT_NAMES,
) -> MixtureDescription:
    """Experts of `inner_key` features, and `n_shared_experts` as large that compute every token."""
    inner, shared = config.integer(inner_key, default_inner), config.count("n_shared_experts", default_shared)
    activation = read_activation(config)
    return MixtureDescription(
        router, inner, activation, bias=bias, shared_inner_size=shared * inner, expert_names=names
    )


def with_mixtures(
    layers: tuple[LayerDescription, ...], mixture: MixtureDescription, is_dense: Callable[[int], bool]
) -> tuple[LayerDescription, ...]:
    """Dense `layers`, with `mixture` in all but those for whose number `is_dense` is true."""
    return tuple(layer if is_dense(number) else replace(layer, mlp=mixture) for number, layer in enumerate(layers))
