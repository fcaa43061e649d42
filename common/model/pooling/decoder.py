"""A decoder-only model that pools: hidden states of a batch of texts, without padding and without a KV cache.

The layers are those that generate; attention sees only the texts of its own batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as fn
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionMetadata
from common.config.option_groups import LoadFormat, Quantization
from common.control.pooling import PoolInput
from common.model.loader import load_model
from common.model.pooling.decoder_config import PoolingDecoderConfig
from common.model.pooling.pool import same_length


class PoolingDecoder:
    """One rank's decoder, on a CPU.

    Raises: ConfigError for missing or wrong weights.
    """

    def __init__(
        self,
        path: Path,
        config: PoolingDecoderConfig,
        *,
        dtype: str = "auto",
        load_format: LoadFormat = "auto",
        seed: int = 0,
        quantization: Quantization = "auto",
    ) -> None:
        """The options are those of `load_model`."""
        self.config = config
        self._model = load_model(
            path,
            config.model,
            dtype=dtype,
            load_format=load_format,
            seed=seed,
            small_batches=False,
            quantization=quantization,
            lm_head=False,
        )

    def hidden(self, inputs: Sequence[PoolInput]) -> tuple[Tensor, list[int]]:
        """The last hidden states of all tokens, [tokens, hidden] float32, and the number of tokens of each input."""
        lengths = [len(each.token_ids) for each in inputs]
        ids = torch.tensor([token for each in inputs for token in each.token_ids])
        positions = torch.cat([torch.arange(length) for length in lengths])
        attention = _AttentionWithin(lengths, self._model.attention_shape(1).scale)
        return self._model.forward(ids, positions, attention).float(), lengths

    def scores(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        raise NotImplementedError("decoders embed, they do not score")


class _AttentionWithin:
    """`AttentionBackend` of one batch of whole texts, causal within each, without a cache."""

    def __init__(self, lengths: Sequence[int], scale: float | None) -> None:
        self._groups = same_length(lengths)
        self._scale = scale

    def plan(self, metadata: AttentionMetadata) -> None:
        raise NotImplementedError("planned when it was made")

    def for_graph(self, rows: int) -> AttentionBackend:
        raise NotImplementedError("texts are not captured")

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `AttentionBackend.forward`."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for rows, length in self._groups:
            own_q, own_k, own_v = (each[rows].unflatten(0, (-1, length)).transpose(1, 2) for each in (q, k, v))
            mixed = fn.scaled_dot_product_attention(
                own_q, own_k, own_v, is_causal=True, scale=self._scale, enable_gqa=True
            )
            out[rows] = mixed.transpose(1, 2).flatten(0, 1)
        return out
