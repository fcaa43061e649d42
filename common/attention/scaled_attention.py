"""PyTorch's scaled dot-product attention, with a soft cap of scores where the model has one."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def scaled_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, soft_cap: float | None
) -> Tensor:
    """As `F.scaled_dot_product_attention` over [..., heads, tokens, head_dim]; `mask` is bool (true: attend) or added to
    capped scores. With a cap it computes in float32."""
    if soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    factor = (q.size(-1) ** -0.5 if scale is None else scale) / soft_cap
    scores = (q.float() @ k.float().transpose(-2, -1)).mul_(factor).tanh_().mul_(soft_cap)
    scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)
