"""The interface of one rank's part of a model, whoever computes its layers: `DecoderModel` and `GenericModel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionShape
from common.model.config import ModelConfig
from common.model.description import AttentionDescription
from common.model.lora.adapters import Adapters
from common.model.precision import Precision
from common.model.sharding import HeadRange
from common.parallel.mesh import Mesh

OnProgress = Callable[[int, int], None]
"""Called with (parts done, parts in all) while weights load."""


class RankModel(Protocol):
    """A pipeline stage's layers, and of these a share of the heads and inner features. `forward` and `logits` run under
    inference mode."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def precision(self) -> Precision: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def kv_scales(self) -> tuple[tuple[float, float], ...]:
        """(K, V) of each layer of this rank, for an FP8 cache."""
        ...

    @property
    def adapters(self) -> Adapters:
        """LoRA adapters that steps can name."""
        ...

    def attention_shape(self, block_size: int, max_context: int = 0) -> AttentionShape:
        """The facts about this rank's part of the model that an attention backend needs, apart from sliding windows, which
        the layer groups of its KV have."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        on_layer: Callable[[int], None] | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run this stage's layers over one step's rows; `attention` has been planned for them.

        token_ids, positions: [T] int64. hidden: [T, hidden], what the previous stage's `forward` returned, which may be
        changed in place; None on the first stage. Calls `on_layer(i)` as soon as the KV of this stage's i-th layer is
        final, which is before that layer's output projection and MLP. Returns [T, hidden]; on the last stage, after the
        final norm.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """hidden: [rows, hidden], of `forward` on the last stage, all of whose ranks call this together.

        Returns [rows, vocab] float32 on that stage's `tp_rank` 0, None on the others.
        """
        ...


def attention_shape(
    attention: AttentionDescription, heads: HeadRange, dtype: torch.dtype, block_size: int, max_context: int
) -> AttentionShape:
    """The shape for this rank's `heads`, as `RankModel.attention_shape` returns it."""
    return AttentionShape(
        heads.num_q,
        heads.num_kv,
        attention.head_dim,
        dtype,
        block_size,
        max_context,
        attention.scale,
        soft_cap=attention.soft_cap,
    )
