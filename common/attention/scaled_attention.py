"""PyTorch's scaled dot-product attention, with a soft cap of scores and sinks where the model has them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def scaled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`F.scaled_dot_product_attention` over [..., heads, tokens, head_dim]; `mask` is bool (true: attend) or added to
    capped scores. With a cap or sinks it computes in float32. sinks: [heads, tokens], as for `softmax`."""
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (q.float() @ k.float().transpose(-2, -1)).mul_(q.size(-1) ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)
    return (softmax(scores, sinks) @ v.float()).to(q.dtype)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension. scores: [..., heads, tokens, keys]. sinks: [heads, tokens], a score of each row that has
    no key."""
    if sinks is None:
        return scores.softmax(-1)
    joined = torch.cat([scores, sinks.to(scores.dtype).expand(scores.shape[:-1])[..., None]], -1)
    return joined.softmax(-1)[..., :-1]
