"""The interface of one rank's part of a model: of `DecoderModel` (native families) and `GenericModel` (transformers)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from common.attention.base import AttentionBackend, AttentionShape
from common.model.build import Build
from common.model.draft_head import DraftHead
from common.model.lora.adapters import Adapters
from common.model.mixture.slots import ExpertSlots
from common.parallel.stage_tensors import StageSchema, StageTensor

HIDDEN = "hidden"
"""Name of the hidden states, [T, hidden], among the tensors of a stage."""
AUX_HIDDEN = "aux_hidden"
"""Name of the hidden states that a draft head reads in place of `HIDDEN`: [T, layers * hidden], the inputs of some layers."""
OnProgress = Callable[[int, int], None]
"""Called with (parts done, parts in all) while weights load."""


class RankModel(ABC):
    """A pipeline stage's layers, with this rank's share of their heads and inner features. `forward` and `logits` run under
    inference mode."""

    kv_scales: Sequence[tuple[float, ...]]
    """For each layer of this rank, the scale of each plane, for an FP8 cache."""

    def __init__(self, build: Build) -> None:
        self.config = build.config
        self.precision = build.precision
        self.mesh = build.mesh
        self.device = build.device
        self.adapters = Adapters(build)
        """LoRA adapters that steps can name."""
        self.expert_layers: dict[int, ExpertSlots] = {}
        """Mixtures whose experts may move, by the layer's number in the model."""
        self.draft_head: DraftHead | None = None
        """Guesses tokens from hidden states."""

    def stage_schema(self, rows: int) -> StageSchema:
        """What a stage hands to the next in a step of `rows` rows."""
        return (StageTensor(HIDDEN, (self.config.hidden_size,), self.precision.for_rows(rows)),)

    @abstractmethod
    def attention_shapes(self, block_size: int, max_context: int = 0) -> Sequence[AttentionShape]:
        """For each layer of this rank, that of a draft head included, the facts that its attention backend needs."""

    @abstractmethod
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        on_layer: Callable[[int], None] | None = None,
        received: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Run this stage's layers over one step's rows; `attention` has been planned for them.

        token_ids, positions: [T] int64. `received`: what the previous stage's `forward` returned, which may be changed in
        place; None on the first stage. Calls `on_layer(i)` as soon as the KV of this stage's i-th layer is final, which is
        before that layer's output projection and MLP. Returns the tensors of `stage_schema`; on the last stage, `HIDDEN`
        after the final norm, and `AUX_HIDDEN` if a draft head reads it.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor | None:
        """hidden: [rows, hidden], of `forward` on the last stage, all of whose ranks call this together.

        Returns [rows, vocab] float32 on that stage's `tp_rank` 0, None on the others.
        """
