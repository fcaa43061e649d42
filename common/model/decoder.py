"""The frame of a decoder-only model: embedding, layers, final norm, head. A family says how one attention is built."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.attention.base import AttentionBackend
from common.model.layers import Attention, Build, Linear, Mlp, RMSNorm, Rope, RopeStep

OnProgress = Callable[[int, int], None]
"""Called with (parts done, parts in all) while weights load."""


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, build: Build, index: int, attention: Attention) -> None:
        prefix, config = f"model.layers.{index}", build.config
        self._index = index
        self._attention = attention
        self._mlp = Mlp(build, f"{prefix}.mlp")
        norms = [
            build.read(f"{prefix}.{n}.weight", config.hidden_size)
            for n in ("input_layernorm", "post_attention_layernorm")
        ]
        self._input_norm, self._mlp_norm = (RMSNorm(weight, config.rms_norm_eps) for weight in norms)

    def forward(
        self, x: Tensor, rope: RopeStep, backend: AttentionBackend, on_layer: Callable[[int], None] | None
    ) -> Tensor:
        """x: [T, hidden], changed in place and returned."""
        attended = self._attention.attend(self._input_norm.forward(x), self._index, rope, backend)
        if on_layer is not None:
            on_layer(self._index)
        x.add_(self._attention.project(attended))
        return x.add_(self._mlp.forward(self._mlp_norm.forward(x)))


class DecoderModel:
    """A whole model on one rank. Weights never change after construction."""

    def __init__(self, build: Build, on_progress: OnProgress = lambda done, total: None) -> None:
        config = build.config
        parts = config.num_layers + 2
        self.config = config
        self.precision = build.precision
        self._embedding = build.read("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        on_progress(1, parts)
        self._layers: list[DecoderLayer] = []
        for i in range(config.num_layers):
            self._layers.append(DecoderLayer(build, i, self.build_attention(build, f"model.layers.{i}.self_attn")))
            on_progress(i + 2, parts)
        self._norm = RMSNorm(build.read("model.norm.weight", config.hidden_size), config.rms_norm_eps)
        self._head = self._build_head(build)
        self._rope = Rope(config)
        on_progress(parts, parts)

    def build_attention(self, build: Build, prefix: str) -> Attention:
        """The attention of one layer; a family overrides this where its own differs."""
        return Attention(build, prefix)

    def _build_head(self, build: Build) -> Linear:
        config = build.config
        if config.tie_word_embeddings:
            return Linear(self._embedding, None, build.precision)
        return build.linear(["lm_head"], [config.vocab_size], config.hidden_size, bias=False)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run all layers over one step's rows; `attention` has been planned for them.

        token_ids, positions: [T] int64. Calls `on_layer(i)` as soon as layer i's KV is final, which is before that
        layer's output projection and MLP. Returns [T, hidden], after the final norm.
        """
        dtype = self.precision.for_rows(token_ids.size(0))
        x = self._embedding.index_select(0, token_ids).to(dtype)
        rope = self._rope.step(positions, dtype)
        for layer in self._layers:
            x = layer.forward(x, rope, attention, on_layer)
        return self._norm.forward(x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], of `forward`. Returns [rows, vocab] float32."""
        return self._head.forward(hidden.to(self.precision.for_rows(hidden.size(0)))).float()
