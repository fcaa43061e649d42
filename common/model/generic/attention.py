"""The attention function that transformers' classes call: it hands q, k and v to the step's `AttentionBackend`.

Runs on a rank's engine thread, under inference mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from common.attention.base import AttentionBackend
from common.model.sharding import HeadRange
from common.parallel.mesh import Mesh

NAME = "kvrelay"
"""The attention implementation. It has no mask function, so transformers builds no masks for it."""
STATE = "kvrelay_attention"
"""The attribute of a class's attention module that holds its `LayerAttention`."""


class CurrentStep:
    """The backend and the callback of the step that is running."""

    backend: AttentionBackend
    on_layer: Callable[[int], None] | None = None


class LayerAttention:
    """The attention of one layer."""

    def __init__(
        self, step: CurrentStep, index: int, heads: HeadRange, query_factor: float, head_dim: int, join: Mesh | None
    ) -> None:
        """`index` counts from this rank's first layer. `heads`: this rank's. `query_factor`: this layer's scale divided by
        the backend's. `head_dim`: width of the cached keys and values. `join`: the ranks whose heads are put together,
        where each is given all heads and must return all; None: what follows uses only those of this rank."""
        self._step = step
        self._index = index
        self._heads = heads
        self._query_factor = query_factor
        self._head_dim = head_dim
        self._join = join

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key, value: [1, heads, T, dim], of this rank's heads or of all. Returns [1, T, heads, dim] of the
        same heads."""
        heads, num_given = self._heads, query.size(1)
        is_whole = num_given != heads.num_q
        if is_whole:
            query = query[:, heads.q_lo : heads.q_hi]
            key, value = (x[:, heads.kv_lo : heads.kv_hi] for x in (key, value))
        if self._query_factor != 1.0:
            query = query * self._query_factor
        width = value.size(-1)
        if width < self._head_dim:
            value = F.pad(value, (0, self._head_dim - width))
        step = self._step
        rows = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # faster than an index
        out = step.backend.forward(self._index, *rows)
        if step.on_layer is not None:
            step.on_layer(self._index)
        if width < self._head_dim:
            out = out[..., :width]
        if is_whole:
            placed = out.new_zeros(out.size(0), num_given, width)
            placed[:, heads.q_lo : heads.q_hi] = out
            out = placed if self._join is None else self._join.all_reduce(placed)
        return out.unsqueeze(0)


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The function. Scale, window, soft cap and sinks are among `options`; `common.model.generic.probe` has found them before."""
    of_layer: Callable[..., Tensor] = getattr(module, STATE).attend
    if has_torch_function((query,)):  # while a step is recorded
        return handle_torch_function(of_layer, (query,), query, key, value), None
    return of_layer(query, key, value), None
