"""An EAGLE-3 head on one rank: a draft head from a checkpoint of its own. Runs on a rank's engine thread, under inference mode.

Source: arXiv 2503.01840, section 3. It reads the inputs of three of the model's layers, joined by one matrix, and guesses tokens of a
smaller vocabulary. Rows are shifted by one, and the row of position 0 is zero, as `common.model.draft_head` says.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from common.attention.base import AttentionBackend
from common.base.errors import ConfigError
from common.model.attention import MultiHeadAttention
from common.model.build import Build, Share
from common.model.description import USUAL_ENDS, WeightNames, multi_head
from common.model.draft_head import DraftHead
from common.model.draft_head_description import DraftHeadDescription
from common.model.layers import Embedding, LMHead
from common.model.mlp import make_mlp
from common.model.norms import make_norm
from common.model.tensor_files import TensorFiles
from common.model.weights import CheckpointWeights

_LAYER = "midlayer"
_BEGINNINGS = (
    (f"{_LAYER}.", "layers.0."),
    ("fc.", "model.fc."),
    ("norm.", "model.norm."),
    (f"{_LAYER}.", "model.layers.0."),
)
"""Names that other tools give."""


class EagleHead(DraftHead):
    """Every rank joins hidden states whole; attention, MLP and LM head are split like the model's."""

    def __init__(self, build: Build, head: DraftHeadDescription, vocabulary: Tensor) -> None:
        """build: of the model. vocabulary: its embedding, which the head shares if it has none."""
        assert head.path is not None
        super().__init__(build, head.layer)
        hidden, layer = build.config.hidden_size, head.layer
        names = WeightNames(layer=_LAYER, embedding="embed_tokens")
        config = replace(
            build.config, layers=(layer,), weight_names=names, ends=USUAL_ENDS, quantization=None, draft_head=None
        )
        weights = CheckpointWeights(head.path, None, build.device, _BEGINNINGS)
        build = replace(build, config=config, weights=weights, pp_layers=(), redundant_experts=None, packed_as="EAGLE ")
        self.kv_scales = ((1.0,) * len(layer.attention.planes), (1.0,))
        has_own = f"{names.embedding}.weight" in weights
        self._embedding = Embedding(build, build.vocabulary(f"{names.embedding}.weight") if has_own else vocabulary)
        self._join = build.column_linear(["fc"], [Share(hidden, 0, hidden)], len(head.aux_layers) * hidden, bias=False)
        self._embedding_norm = make_norm(build, f"{_LAYER}.input_layernorm", layer.norm)
        self._hidden_norm = make_norm(build, f"{_LAYER}.hidden_norm", layer.norm)
        self._attention = MultiHeadAttention(build, f"{_LAYER}.", multi_head(layer), 2 * hidden)
        self._mlp_norm = make_norm(build, f"{_LAYER}.post_attention_layernorm", layer.norm)
        self._mlp = make_mlp(build, f"{_LAYER}.", layer.mlp)
        self._is_residual_normed = head.is_residual_normed
        self._norm = make_norm(build, "norm", layer.norm)
        self._ids = _target_ids(TensorFiles(head.path), head.vocab_size, config.vocab_size).to(build.device)
        self._vocab_size = config.vocab_size
        own = replace(build, config=replace(config, vocab_size=head.vocab_size))
        self._lm_head = LMHead(own, "lm_head.weight", None)

    def features(self, hidden: Tensor) -> Tensor:
        """Join the inputs of the auxiliary layers, [T, 3 * hidden]."""
        return self._join.forward(hidden)

    def extend(self, token_ids: Tensor, positions: Tensor, before: Tensor, attention: AttentionBackend) -> None:
        self._attend(token_ids, positions, before, attention)

    def forward(self, token_ids: Tensor, positions: Tensor, before: Tensor, attention: AttentionBackend) -> Tensor:
        attended, residual = self._attend(token_ids, positions, before, attention)
        normed = self._mlp_norm.forward(residual, self._attention.project(attended))
        return residual.add_(self._mlp.forward(normed))

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[rows, vocab] float32 of what `forward` returned; tokens that the head does not know cannot be drawn."""
        known = super().logits(hidden)
        if known is None:
            return None
        return known.new_full((known.size(0), self._vocab_size), float("-inf")).index_copy_(1, self._ids, known)

    def _attend(
        self, token_ids: Tensor, positions: Tensor, before: Tensor, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """What attention gives before its output projection, and the residual: [T, hidden], fresh."""
        dtype = self._precision.for_rows(token_ids.size(0))
        is_first = (positions == 0)[:, None]
        before = before.to(dtype).masked_fill(is_first, 0.0)
        normed = self._hidden_norm.forward(before)
        both = torch.cat((self._embedding_norm.forward(self._embedding.forward(token_ids, dtype)), normed), 1)
        both.masked_fill_(is_first, 0.0)
        attended = self._attention.attend(both, self.layer, self._rotary.step(positions, dtype), attention)
        return attended, normed if self._is_residual_normed else before


def _target_ids(tensors: TensorFiles, draft_size: int, size: int) -> Tensor:
    """[draft vocabulary] int64: the model's id of each of the head's tokens. `d2t` holds their differences.

    Raises: ConfigError if they are not different ids of the model's vocabulary.
    """
    ids = torch.arange(draft_size)
    if "d2t" in tensors:
        ids += tensors.read("d2t", (draft_size,)).long()
    elif draft_size != size:
        raise ConfigError(
            f"the EAGLE head knows {draft_size} of {size} tokens, and the tensor d2t that names them is missing"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= size or ids.unique().numel() != draft_size:
        raise ConfigError(f"the EAGLE head's tensor d2t does not name {draft_size} different tokens of {size}")
    return ids
