"""Draft heads on one rank: they guess the next token from the model's hidden states. Runs on a rank's engine thread, under
inference mode.

In DeepSeek-V3, arXiv 2412.19437, section 2.2, row i combines the hidden state at i with token i + 1; here the same row is
called i + 1, so that it depends on no later token. RoPE is relative, so the attention is the same. Nothing precedes token 0:
its row is zero, so its key has the score 0 and its value adds nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionShape
from common.base.errors import ConfigError
from common.model.attention import Attention, MultiHeadAttention
from common.model.build import Build, Share
from common.model.decoder_layer import DecoderLayer, ForwardContext
from common.model.description import USUAL_ENDS, LayerDescription, WeightNames, multi_head
from common.model.draft_head_description import DraftHeadDescription
from common.model.layers import Embedding, LMHead
from common.model.mlp import make_mlp
from common.model.norms import Norm, make_norm
from common.model.rotary import make_rotary
from common.model.tensor_files import TensorFiles
from common.model.weights import CheckpointWeights

_EAGLE_LAYER = "midlayer"
_EAGLE_NAMES = (
    (f"{_EAGLE_LAYER}.", "layers.0."),
    ("fc.", "model.fc."),
    ("norm.", "model.norm."),
    (f"{_EAGLE_LAYER}.", "model.layers.0."),
)
"""Prefixes of names, and those that other tools give in their place."""


class DraftHead(ABC):
    """A head of one rank."""

    kv_scales: tuple[tuple[float, ...], ...]
    """KV scales of the head's layer and of the hidden rows, as in `RankModel.kv_scales`."""
    _attention: Attention
    _norm: Norm
    _lm_head: LMHead

    def __init__(self, build: Build, layer: LayerDescription) -> None:
        """build: of the model. layer: the head's."""
        self.layer = build.config.num_layers
        """Number of its layer in the rank's KV; that of the hidden rows follows."""
        self._precision = build.precision
        max_context, dim = build.config.max_context, layer.attention.rotary_dim
        self._rotary = make_rotary(layer.rope, dim, max_context, build.kernels, build.device)

    def attention_shape(self, block_size: int, max_context: int) -> AttentionShape:
        """The facts that its attention backend needs."""
        return self._attention.shape(block_size, max_context)

    @abstractmethod
    def features(self, hidden: Tensor) -> Tensor:
        """[T, hidden], for each row what the head reads at the next position. hidden: of `RankModel.forward`, `AUX_HIDDEN` if the
        head reads that."""

    @abstractmethod
    def extend(self, token_ids: Tensor, positions: Tensor, before: Tensor, attention: AttentionBackend) -> None:
        """Write the head's KV of a step's rows; `attention` has been planned for them.

        token_ids, positions: [T] int64. before: [T, hidden], the features of the position before each row.
        """

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, before: Tensor, attention: AttentionBackend) -> Tensor:
        """Write the head's KV as `extend` does, and compute the rows' outputs: [T, hidden], from which `logits` makes the guess
        after each token. They are also the features of the next position."""

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[rows, vocab] float32 of what `forward` returned: `RankModel.logits`."""
        return self._lm_head.forward(self._norm.forward(hidden.to(self._precision.for_rows(hidden.size(0)))))


class MtpHead(DraftHead):
    """The layer for multi-token prediction of a checkpoint; it is applied again and again for further guesses.

    Every rank combines embedding and hidden state whole; its attention, its MLP and its LM head are split like the model's.
    """

    def __init__(self, build: Build, head: DraftHeadDescription, embedding: Embedding, lm_head: LMHead) -> None:
        """build: of the model. embedding, lm_head: the model's. An LM head that is stored with the layer takes the place of
        `lm_head`; a stored embedding is a copy of the model's, and is not read."""
        super().__init__(build, head.layer)
        config, hidden = build.config, build.config.hidden_size
        prefix = build.names.layer.format(number=self.layer)
        build = replace(
            build, config=replace(config, layers=(*config.layers, head.layer)), pp_layers=(), redundant_experts=None
        )
        self._embedding = embedding
        self._embedding_norm = make_norm(build, f"{prefix}.enorm", head.layer.norm)
        self._hidden_norm = make_norm(build, f"{prefix}.hnorm", head.layer.norm)
        self._combine = build.column_linear([f"{prefix}.eh_proj"], [Share(hidden, 0, hidden)], 2 * hidden, bias=False)
        self._layer = DecoderLayer(build, self.layer, self.layer)
        self._attention = self._layer.attention
        self._norm = make_norm(build, f"{prefix}.shared_head.norm", head.layer.norm)
        own = f"{prefix}.shared_head.head.weight"
        self._lm_head = LMHead(build, own, None) if own in build.weights else lm_head
        self.kv_scales = (self._layer.kv_scales, (1.0,))

    def features(self, hidden: Tensor) -> Tensor:
        """The model's hidden states after its final norm."""
        return hidden

    def extend(self, token_ids: Tensor, positions: Tensor, before: Tensor, attention: AttentionBackend) -> None:
        x = self._inputs(token_ids, positions, before)
        rotation = self._rotary.step(positions, x.dtype)
        self._attention.attend(self._layer.input_norm.forward(x, None), self.layer, rotation, attention)

    def forward(self, token_ids: Tensor, positions: Tensor, before: Tensor, attention: AttentionBackend) -> Tensor:
        x = self._inputs(token_ids, positions, before)
        context = ForwardContext([self._rotary.step(positions, x.dtype)], attention)
        return x.add_(self._layer.forward(x, None, context))

    def _inputs(self, token_ids: Tensor, positions: Tensor, before: Tensor) -> Tensor:
        """[T, hidden], zero at position 0."""
        dtype = self._precision.for_rows(token_ids.size(0))
        embedded = self._embedding_norm.forward(self._embedding.forward(token_ids, dtype))
        both = torch.cat((embedded, self._hidden_norm.forward(before.to(dtype))), 1)
        return self._combine.forward(both.masked_fill_((positions == 0)[:, None], 0.0))


class EagleHead(DraftHead):
    """An EAGLE-3 head, from a checkpoint of its own. It reads the inputs of three of the model's layers, joined by one matrix,
    and guesses tokens of a smaller vocabulary. Source: arXiv 2503.01840, section 3.

    Every rank joins hidden states whole; attention, MLP and LM head are split like the model's.
    """

    def __init__(self, build: Build, head: DraftHeadDescription, vocabulary: Tensor) -> None:
        """build: of the model. vocabulary: its embedding, which the head shares if it has none."""
        assert head.path is not None
        super().__init__(build, head.layer)
        hidden, layer = build.config.hidden_size, head.layer
        names = WeightNames(layer=_EAGLE_LAYER, embedding="embed_tokens")
        config = replace(
            build.config, layers=(layer,), weight_names=names, ends=USUAL_ENDS, quantization=None, draft_head=None
        )
        weights = CheckpointWeights(head.path, None, build.device, _EAGLE_NAMES)
        build = replace(build, config=config, weights=weights, pp_layers=(), redundant_experts=None, packed_as="EAGLE ")
        self.kv_scales = ((1.0,) * len(layer.attention.planes), (1.0,))
        has_own = f"{names.embedding}.weight" in weights
        self._embedding = Embedding(build, build.vocabulary(f"{names.embedding}.weight") if has_own else vocabulary)
        self._join = build.column_linear(["fc"], [Share(hidden, 0, hidden)], len(head.aux_layers) * hidden, bias=False)
        self._embedding_norm = make_norm(build, f"{_EAGLE_LAYER}.input_layernorm", layer.norm)
        self._hidden_norm = make_norm(build, f"{_EAGLE_LAYER}.hidden_norm", layer.norm)
        self._attention = MultiHeadAttention(build, f"{_EAGLE_LAYER}.", multi_head(layer), 2 * hidden)
        self._mlp_norm = make_norm(build, f"{_EAGLE_LAYER}.post_attention_layernorm", layer.norm)
        self._mlp = make_mlp(build, f"{_EAGLE_LAYER}.", layer.mlp)
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
