"""Description of a draft head: one more decoder layer, which guesses tokens from the model's hidden states. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from common.model.description import LayerDescription

HIDDEN_PLANE = "hidden"
"""The plane with the row that the head reads at the next position: `DraftHead.features` of this position's hidden state, or the
head's own output for a guessed position."""


@dataclass(frozen=True)
class DraftHeadDescription:
    """A head that belongs to one model.

    It adds two layers to the model's KV (`common.model.kv_spec`): its attention's, and the rows of `HIDDEN_PLANE`. Position i
    is computed from the hidden state at i - 1 and token i, so KV of a block depends on no token after it.
    """

    layer: LayerDescription
    path: Path | None = None
    """Folder of the head's own checkpoint; None: the model's holds it."""
    identity: str = ""
    """Digest of that checkpoint."""
    aux_layers: tuple[int, ...] = ()
    """Layers of the model whose inputs the head reads, ascending; none: it reads what the LM head reads."""
    vocab_size: int = 0
    """Tokens that a head with its own checkpoint can guess."""
    is_residual_normed: bool = False
    """Whether a head with its own checkpoint adds to the normed hidden state, instead of the hidden state itself."""

    @property
    def method(self) -> str:
        """The method of speculation that it serves: `common.config.speculation.HEAD_METHODS`."""
        return "mtp" if self.path is None else "eagle3"

    @property
    def name(self) -> str:
        """The head, in the fingerprint of its node."""
        return f"{self.method}.{self.identity}" if self.identity else self.method

    def for_context(self, max_model_len: int) -> DraftHeadDescription:
        """The same head for contexts of at most this many tokens."""
        return replace(self, layer=self.layer.for_context(max_model_len))
