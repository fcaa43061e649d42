"""The modules before and after a decoder's layers: embedding, learned positions, LM head. They run on a rank's engine thread,
under inference mode.

Parts are built complete, from a `WeightSource`; there is no uninitialised state. They are plain classes:
at one token a step, an eager operation costs 5 us and more, and a module's call hooks would add to each.
Activations of one step have the dtype that `Precision.for_rows` gives; each part follows its input's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.model.build import Build
from common.model.description import PositionsDescription
from common.model.formats.base import Linear
from common.model.sharding import vocab_range


class Embedding:
    """Token ids to hidden states. Each rank of the stage holds a range of the ids; an all-reduce adds up the ranks' rows."""

    def __init__(self, build: Build, weight: Tensor) -> None:
        """weight: [vocab_rows, hidden], of `Build.vocabulary`."""
        place = build.mesh.place
        self._mesh = build.mesh
        self._weight = weight
        self._lo, self._hi = vocab_range(build.config.vocab_size, place.tp_size, place.tp_rank)
        self._is_whole = place.tp_size == 1
        ends = build.config.ends
        self._multiplier = ends.embedding_multiplier
        if ends.is_multiplier_rounded:
            self._multiplier = torch.tensor(ends.embedding_multiplier).to(build.precision.weight).item()

    def plain_weight(self, dtype: torch.dtype) -> Tensor | None:
        """[vocab, hidden], if its rows are the hidden states, of `dtype`."""
        weight = self._weight
        is_plain = self._is_whole and self._multiplier == 1.0 and weight.dtype == dtype and weight.is_contiguous()
        return weight if is_plain else None

    def forward(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """token_ids: [T] int64, all in the vocabulary. Returns a fresh [T, hidden] of `dtype`."""
        if self._is_whole:
            x = self._weight.index_select(0, token_ids).to(dtype)
            return x if self._multiplier == 1.0 else x.mul_(self._multiplier)
        elsewhere = (token_ids < self._lo) | (token_ids >= self._hi)
        rows = (token_ids - self._lo).masked_fill_(elsewhere, 0)
        x = self._weight.index_select(0, rows).to(dtype).masked_fill_(elsewhere[:, None], 0.0)
        return self._mesh.all_reduce(x if self._multiplier == 1.0 else x.mul_(self._multiplier))


class LearnedPositions:
    """A row for each position, which every rank of the first stage holds."""

    def __init__(self, build: Build, positions: PositionsDescription) -> None:
        self._weight = build.read(f"{build.names.positions}.weight", positions.rows, build.config.hidden_size)
        self._offset = positions.offset

    def add_(self, x: Tensor, positions: Tensor) -> None:
        """Add its row to each of `x`, [T, hidden]. positions: [T] int64."""
        x.add_(self._weight.index_select(0, positions + self._offset if self._offset else positions))


class LMHead:
    """Hidden states to logits; each rank of the stage computes those of its range of the vocabulary."""

    def __init__(self, build: Build, name: str, tied: Tensor | None) -> None:
        """`name`: of the matrix. tied: [vocab_rows, hidden], the embedding where that is the same matrix."""
        self._mesh = build.mesh
        self._linear = build.lm_head_linear(name, tied)
        self._vocab_size = build.config.vocab_size
        self._divisor = build.config.ends.logits_divisor
        self._soft_cap = build.config.ends.logits_soft_cap

    def plain_linear(self) -> Linear | None:
        """The matrix, if its products are the logits."""
        is_plain = self._mesh.place.tp_size == 1 and self._divisor == 1.0 and self._soft_cap is None
        return self._linear if is_plain else None

    def forward(self, x: Tensor) -> Tensor | None:
        """x: [rows, hidden]. Returns [rows, vocab] float32 on the stage's `tp_rank` 0, None on the others."""
        logits = self._mesh.gather_columns(self._linear.forward(x, torch.float32))
        if logits is None:
            return None
        logits = logits[:, : self._vocab_size]
        if self._soft_cap is not None:
            return logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits if self._divisor == 1.0 else logits.div_(self._divisor)
