"""A draft head on one rank: guesses the next token from the model's hidden states. Runs on a rank's engine thread, under
inference mode.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2. There, row i combines the hidden state at i with token i + 1; here the same row is
called i + 1, so that it depends on no later token. RoPE is relative, so the attention is the same. Nothing precedes token 0:
its row is zero, so its key has the score 0 and its value adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionShape
from common.model.build import Build, Share
from common.model.decoder_layer import DecoderLayer
from common.model.draft_head_description import DraftHeadDescription
from common.model.layers import LMHead
from common.model.norms import make_norm
from common.model.rotary import make_rotary

Embed = Callable[[Tensor, torch.dtype], Tensor]
"""`common.model.layers.Embedding.forward`."""


class DraftHead(Protocol):
    """A head of one rank."""

    layer: int
    """Number of its layer in the rank's KV; that of the hidden rows follows."""
    kv_scales: tuple[tuple[float, ...], ...]
    """KV scales of the head's layer and of the hidden rows, as in `RankModel.kv_scales`."""

    def attention_shape(self, block_size: int, max_context: int) -> AttentionShape:
        """The facts that its attention backend needs."""
        ...

    def features(self, hidden: Tensor) -> Tensor:
        """[T, hidden], for each row what the head reads at the next position. hidden: of `RankModel.forward`, `AUX_HIDDEN` if the
        head reads that."""
        ...

    def extend(self, token_ids: Tensor, positions: Tensor, before: Tensor, attention: AttentionBackend) -> None:
        """Write the head's KV of a step's rows; `attention` has been planned for them.

        token_ids, positions: [T] int64. before: [T, hidden], the features of the position before each row.
        """
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, before: Tensor, attention: AttentionBackend) -> Tensor:
        """Write the head's KV as `extend` does, and compute the rows' outputs: [T, hidden], from which `logits` makes the guess
        after each token. They are also the features of the next position."""
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[rows, vocab] float32 of what `forward` returned: `RankModel.logits`."""
        ...


class MtpHead:
    """The layer for multi-token prediction of a checkpoint; it is applied again and again for further guesses.

    Every rank combines embedding and hidden state whole; its attention, its MLP and its LM head are split like the model's.
    """

    def __init__(self, build: Build, head: DraftHeadDescription, embed: Embed, lm_head: LMHead) -> None:
        """build: of the model. embed, lm_head: the model's. An LM head that is stored with the layer takes the place of `lm_head`; a
        stored embedding is a copy of the model's, and is not read."""
        config, names = build.config, build.names
        number, hidden = config.num_layers, config.hidden_size
        prefix = names.layer.format(number=number)
        build = replace(
            build, config=replace(config, layers=(*config.layers, head.layer)), pp_layers=(), redundant_experts=None
        )
        whole = Share(hidden, 0, hidden)
        self._embed = embed
        self._precision = build.precision
        self._embedding_norm = make_norm(build, f"{prefix}.enorm", head.layer.norm)
        self._hidden_norm = make_norm(build, f"{prefix}.hnorm", head.layer.norm)
        self._combine = build.column_linear([f"{prefix}.eh_proj"], [whole], 2 * hidden, bias=False)
        self._layer = DecoderLayer(build, number, number)
        rope, dim = head.layer.rope, head.layer.attention.rotary_dim
        self._rope = make_rotary(rope, dim, config.max_context, build.kernels, build.device)
        self._norm = make_norm(build, f"{prefix}.shared_head.norm", head.layer.norm)
        own = f"{prefix}.shared_head.head.weight"
        self._lm_head = LMHead(build, own, None) if own in build.weights else lm_head
        self.layer = number
        self.kv_scales = (self._layer.kv_scales, (1.0,))

    def attention_shape(self, block_size: int, max_context: int) -> AttentionShape:
        """The facts that its attention backend needs."""
        return self._layer.attention.shape(block_size, max_context)

    def features(self, hidden: Tensor) -> Tensor:
        """The model's hidden states after its final norm."""
        return hidden

    def extend(self, token_ids: Tensor, positions: Tensor, before: Tensor, attention: AttentionBackend) -> None:
        """Write the head's KV: `DraftHead.extend`."""
        x = self._inputs(token_ids, positions, before)
        rope = self._rope.step(positions, x.dtype)
        self._layer.attention.attend(self._layer.input_norm.forward(x, None), self.layer, rope, attention)

    def forward(self, token_ids: Tensor, positions: Tensor, before: Tensor, attention: AttentionBackend) -> Tensor:
        """Compute rows: `DraftHead.forward`."""
        x = self._inputs(token_ids, positions, before)
        rope = self._rope.step(positions, x.dtype)
        return x.add_(self._layer.forward(x, None, rope, attention, None))

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[rows, vocab] float32 of what `forward` returned: `RankModel.logits`."""
        normed = self._norm.forward(hidden.to(self._precision.for_rows(hidden.size(0))))
        return self._lm_head.forward(normed)

    def _inputs(self, token_ids: Tensor, positions: Tensor, before: Tensor) -> Tensor:
        """[T, hidden], zero at position 0."""
        dtype = self._precision.for_rows(token_ids.size(0))
        embedded = self._embedding_norm.forward(self._embed(token_ids, dtype))
        both = torch.cat((embedded, self._hidden_norm.forward(before.to(dtype))), 1)
        return self._combine.forward(both.masked_fill_((positions == 0)[:, None], 0.0))
