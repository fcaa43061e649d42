"""The frame of a decoder-only model: embedding, layers, final norm, head; on one rank, the part that is its own.

A family says how one attention is built.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.attention.base import AttentionBackend
from common.kernels.base import Rotation
from common.model.build import Build
from common.model.layers import Attention, Embedding, Head, Mlp, RMSNorm, inverse_frequencies

OnProgress = Callable[[int, int], None]
"""Called with (parts done, parts in all) while weights load."""


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, build: Build, prefix: str, index: int, attention: Attention) -> None:
        """`index` counts from this rank's first layer."""
        config = build.config
        self._index = index
        self._attention = attention
        self._mlp = Mlp(build, f"{prefix}.mlp")
        norms = [
            build.read(f"{prefix}.{n}.weight", config.hidden_size)
            for n in ("input_layernorm", "post_attention_layernorm")
        ]
        self._input_norm, self._mlp_norm = (RMSNorm(weight, config.rms_norm_eps, build.kernels) for weight in norms)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rope: Rotation,
        backend: AttentionBackend,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """x: [T, hidden], changed in place. `delta` is what is still to be added to it, so that an addition and the
        norm after it can be one kernel. Returns what is to be added next."""
        attended = self._attention.attend(self._input_norm.forward(x, delta), self._index, rope, backend)
        if on_layer is not None:
            on_layer(self._index)
        return self._mlp.forward(self._mlp_norm.forward(x, self._attention.project(attended)))


class DecoderModel:
    """One rank's part of a model: a stage's layers, of these a share of the heads and of the inner features.

    Only the first stage holds the embedding, only the last the final norm and the head; a head that is tied to
    the embedding is read by both. Weights never change after construction.
    """

    def __init__(self, build: Build, on_progress: OnProgress = lambda done, total: None) -> None:
        config, place = build.config, build.mesh.place
        parts = len(build.layers) + 2
        self.config = config
        self.precision = build.precision
        self.mesh = build.mesh
        self.device = build.device
        tied = config.tie_word_embeddings
        needed = place.is_first_stage or (place.is_last_stage and tied)
        vocabulary = build.vocabulary("model.embed_tokens.weight") if needed else None
        self._embedding = Embedding(build, vocabulary) if place.is_first_stage and vocabulary is not None else None
        on_progress(1, parts)
        self._layers: list[DecoderLayer] = []
        for i, number in enumerate(build.layers):
            prefix = f"model.layers.{number}"
            self._layers.append(DecoderLayer(build, prefix, i, self.build_attention(build, f"{prefix}.self_attn")))
            on_progress(i + 2, parts)
        self.kv_scales = tuple(build.kv_scales(f"model.layers.{number}.self_attn") for number in build.layers)
        """(K, V) of each layer of this rank, for an FP8 cache."""
        self._norm: RMSNorm | None = None
        self._head: Head | None = None
        if place.is_last_stage:
            weight = build.read("model.norm.weight", config.hidden_size)
            self._norm = RMSNorm(weight, config.rms_norm_eps, build.kernels)
            own = vocabulary if tied else None
            self._head = Head(build, build.vocabulary("lm_head.weight") if own is None else own)
        frequencies = inverse_frequencies(config.rope, config.head_dim).to(build.device)
        self._rope = build.kernels.rotary(frequencies, config.max_context)
        on_progress(parts, parts)

    def build_attention(self, build: Build, prefix: str) -> Attention:
        """The attention of one layer; a family overrides this where its own differs."""
        return Attention(build, prefix)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        on_layer: Callable[[int], None] | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run this stage's layers over one step's rows; `attention` has been planned for them.

        token_ids, positions: [T] int64. hidden: [T, hidden], what the previous stage's `forward` returned, changed
        in place; None on the first stage. Calls `on_layer(i)` as soon as the KV of this stage's i-th layer is final,
        which is before that layer's output projection and MLP. Returns [T, hidden]; on the last stage, after the
        final norm.
        """
        dtype = self.precision.for_rows(token_ids.size(0))
        if self._embedding is not None:
            hidden = self._embedding.forward(token_ids, dtype)
        assert hidden is not None
        rope = self._rope.step(positions, dtype)
        delta: Tensor | None = None
        for layer in self._layers:
            delta = layer.forward(hidden, delta, rope, attention, on_layer)
        assert delta is not None
        return hidden.add_(delta) if self._norm is None else self._norm.forward(hidden, delta)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor | None:
        """hidden: [rows, hidden], of `forward` on the last stage, all of whose ranks call this together.

        Returns [rows, vocab] float32 on that stage's `tp_rank` 0, None on the others.
        """
        assert self._head is not None
        return self._head.forward(hidden.to(self.precision.for_rows(hidden.size(0))))
