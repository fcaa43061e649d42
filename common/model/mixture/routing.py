"""Which experts compute each token, and the weights of their outputs. Pure; runs on a rank's engine thread.

One function for all families: what differs is in `RouterDescription`. Everything is float32, whatever the model's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from common.model.description import RouterDescription


class Routing(NamedTuple):
    """experts: [T, top_k] int64; weights: [T, top_k] float32, in the order of `experts`."""

    experts: Tensor
    weights: Tensor


def route(logits: Tensor, router: RouterDescription, selection_bias: Tensor | None = None) -> Routing:
    """The experts of each token. logits: [T, experts] float32, with the router's bias; selection_bias: [experts] float32.

    Source: the routers of transformers' models/{mixtral,qwen3_moe,gpt_oss,granitemoe,deepseek_v2,deepseek_v3,glm4_moe}.
    """
    if router.scores == "softmax_of_chosen":
        best = logits.topk(router.top_k, dim=-1)
        return Routing(best.indices, best.values.softmax(-1).mul_(router.scaling))
    scores = logits.sigmoid() if router.scores == "sigmoid" else logits.softmax(-1)
    choice = scores if selection_bias is None else scores + selection_bias
    if router.num_groups > 1:
        choice = _in_best_groups(choice, router)
    experts = choice.topk(router.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if router.normalizes:
        weights /= weights.sum(-1, keepdim=True) + 1e-20
    return Routing(experts, weights.mul_(router.scaling))


def _in_best_groups(choice: Tensor, router: RouterDescription) -> Tensor:
    """`choice` [T, experts], -infinity outside of each token's best groups."""
    groups = choice.unflatten(1, (router.num_groups, -1))
    group_scores = groups.topk(router.group_score_of, dim=-1).values.sum(-1)
    kept = group_scores.topk(router.groups_kept, dim=-1).indices
    is_left_out = groups.new_ones(group_scores.shape).scatter_(1, kept, 0.0).bool()
    return groups.masked_fill(is_left_out[..., None], float("-inf")).flatten(1)
