"""A decoder-only model that pools: hidden states of a batch of texts, without padding and without a KV cache.

The layers are those that generate; attention sees only the texts of its own batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as fn
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from common.control.pooling import PoolInput
from common.model.pooling.decoder_config import PoolingDecoderConfig
from common.model.pooling.pooler import same_length
from common.model.rank_model import HIDDEN, RankModel

_ROWS = 512
"""Tokens of a text that attend in one product, where a sliding window is shorter than the text."""


class PoolingDecoder:
    """`PoolingModel` of one rank's decoder, on a CPU."""

    def __init__(self, model: RankModel, config: PoolingDecoderConfig) -> None:
        self.config = config
        self._model = model

    def hidden(self, inputs: Sequence[PoolInput]) -> tuple[Tensor, list[int]]:
        lengths = [len(each.token_ids) for each in inputs]
        ids = torch.tensor([token for each in inputs for token in each.token_ids])
        positions = torch.cat([torch.arange(length) for length in lengths])
        attention = _AttentionWithin(lengths, self._model.attention_shapes(1))
        return self._model.forward(ids, positions, attention)[HIDDEN].float(), lengths

    def scores(self, hidden: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("decoders embed, they do not score")


class _AttentionWithin:
    """`AttentionBackend` of one batch of whole texts, causal within each, without a cache."""

    def __init__(self, lengths: Sequence[int], shapes: Sequence[AttentionShape]) -> None:
        """`shapes`: of each layer."""
        self._groups = same_length(lengths)
        self._shapes = shapes

    def plan(self, metadata: AttentionMetadata) -> None:
        raise NotImplementedError("planned when it was made")

    def for_graph(self, rows: int) -> AttentionBackend:
        raise NotImplementedError("texts are not captured")

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within each text: `AttentionBackend.forward`."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for rows, length in self._groups:
            own_q, own_k, own_v = (each[rows].unflatten(0, (-1, length)).transpose(1, 2) for each in (q, k, v))
            mixed = _attend(own_q, own_k, own_v, self._shapes[layer])
            out[rows] = mixed.transpose(1, 2).flatten(0, 1)
        return out


def _attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
    """q, k, v: [texts, heads, tokens, head_dim], of texts of equal length."""
    attend = functools.partial(fn.scaled_dot_product_attention, scale=shape.scale, enable_gqa=True)
    length, window = q.size(2), shape.window
    if window is None or length <= window:
        return attend(q, k, v, is_causal=True)
    out = torch.empty_like(q)
    for first in range(0, length, _ROWS):  # a mask of all rows would take the square of the length
        end, seen_from = min(first + _ROWS, length), max(0, first - window + 1)
        row, seen = torch.arange(first, end)[:, None], torch.arange(seen_from, end)
        mask = (seen <= row) & (seen > row - window)
        keys, values = (side[:, :, seen_from:end] for side in (k, v))
        out[:, :, first:end] = attend(q[:, :, first:end], keys, values, attn_mask=mask)
    return out
