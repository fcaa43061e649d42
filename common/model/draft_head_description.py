"""Description of a draft head: one more decoder layer, which guesses tokens from the model's hidden states. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from common.model.description import LayerDescription

HeadMethod = Literal["mtp"]
HIDDEN_PLANE = "hidden"
"""The plane with the row that the head's next position reads: `DraftHead.features` of this one, or what the head made in its
place."""


@dataclass(frozen=True)
class DraftHeadDescription:
    """A head that belongs to one model.

    It adds two layers to the model's KV (`common.model.kv_spec`): its attention's, and the rows of `HIDDEN_PLANE`. Position i
    is computed from the hidden state at i - 1 and token i, so KV of a block depends on no token after it.
    """

    method: HeadMethod
    layer: LayerDescription

    def for_context(self, max_model_len: int) -> DraftHeadDescription:
        """The same head for contexts of at most this many tokens."""
        return replace(self, layer=self.layer.for_context(max_model_len))
