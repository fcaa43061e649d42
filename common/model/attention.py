"""The kinds of attention that a layer's description can name. They run on a rank's engine thread, under inference mode.

A kind consists of its description (`AttentionDescription`: what it caches, its weights, how it is split over ranks), its
layer here, entered in `ATTENTIONS`, and its backends, entered in `common.attention.choose.BACKENDS`. Nothing else knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionShape
from common.base.errors import ConfigError
from common.kernels.base import Rotation
from common.model.build import Build, Share
from common.model.description import AttentionDescription, MultiHeadDescription, implementation
from common.model.latent_attention import LatentAttention
from common.model.latent_description import LatentDescription
from common.model.norms import make_qk_norm
from common.model.tensor_files import Part


class Attention(Protocol):
    """The attention of one layer, on this rank."""

    def attend(self, x: Tensor, layer: int, rope: Rotation, backend: AttentionBackend) -> Tensor:
        """Everything up to the output projection. x: [T, hidden]. `layer` counts from this rank's first; its KV is final
        when this returns."""
        ...

    def project(self, attended: Tensor) -> Tensor:
        """What `attend` returned to [T, hidden], fresh, after an all-reduce: the whole model's output."""
        ...

    def shape(self, block_size: int, max_context: int) -> AttentionShape:
        """The facts that its backend needs."""
        ...


class MultiHeadAttention:
    """Merged q, k, v projection, optional norm of q and k, rope, paged attention, output projection; this rank's heads."""

    def __init__(
        self, build: Build, prefix: str, attention: MultiHeadDescription, num_inputs: int | None = None
    ) -> None:
        """`prefix`: the layer's name and a dot. `num_inputs`: features of its inputs; None: as many as of hidden states.

        Raises: ConfigError for what has no implementation.
        """
        _check_implemented(attention)
        hidden, names, heads = build.config.hidden_size, build.names, build.heads(attention)
        dim = attention.head_dim
        self.heads = (heads.num_q, heads.num_kv, dim)
        self.scale = attention.scale
        self._description = attention
        self._dtype = build.precision.wide
        q = Share(attention.num_q_heads * dim, heads.q_lo * dim, heads.q_hi * dim)
        kv = Share(attention.num_kv_heads * dim, heads.kv_lo * dim, heads.kv_hi * dim)
        merged = [prefix + name for name in (names.q, names.k, names.v)]
        self.qkv = build.column_linear(merged, [q, kv, kv], num_inputs or hidden, bias=attention.qkv_bias)
        self.out = build.row_linear(prefix + names.output, q, hidden, bias=attention.output_bias)
        self.qk_norm = make_qk_norm(build, prefix, attention)
        self._sinks: tuple[Tensor, ...] = ()
        if attention.has_sinks:
            own = Part(0, heads.q_lo, heads.q_hi)
            self._sinks = (build.read(prefix + names.sinks, attention.num_q_heads, part=own).float(),)
        self._mesh = build.mesh

    def attend(self, x: Tensor, layer: int, rope: Rotation, backend: AttentionBackend) -> Tensor:
        """Returns [T, q_heads/tp * head_dim]."""
        q_heads, kv_heads, head_dim = self.heads
        qkv = self.qkv.forward(x).view(x.size(0), q_heads + 2 * kv_heads, head_dim)
        qk, v = qkv[:, : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]
        if self.qk_norm is not None:
            qk = self.qk_norm.forward(qk)
        rope.rotate_(qk, q_heads)
        return backend.forward(layer, qk[:, :q_heads], qk[:, q_heads:], v).flatten(1)

    def project(self, attended: Tensor) -> Tensor:
        return self._mesh.all_reduce(self.out.forward(attended))

    def shape(self, block_size: int, max_context: int) -> AttentionShape:
        shape = multi_head_shape(self._description, self.heads, self._dtype, block_size, max_context)
        return replace(shape, sinks=self._sinks)


def multi_head_shape(
    attention: MultiHeadDescription, heads: tuple[int, int, int], dtype: torch.dtype, block_size: int, max_context: int
) -> AttentionShape:
    """heads: this rank's query heads and KV heads, and the head dimension. `dtype`: of queries."""
    scale, window, soft_cap = attention.scale, attention.window, attention.soft_cap
    return AttentionShape(*heads, dtype, block_size, max_context, scale, window=window, soft_cap=soft_cap)


def _check_implemented(attention: MultiHeadDescription) -> None:
    """Raises: ConfigError naming what attention has no implementation of."""
    kinds = {norm.kind for norm in (attention.head_norm, attention.joint_norm) if norm is not None}
    missing = [f"a {kind!r} norm of heads" for kind in kinds - {"rms"}]
    if attention.v_head_dim != attention.head_dim:
        missing.append(f"heads of v of another width ({attention.v_head_dim}) than those of k ({attention.head_dim})")
    if missing:
        raise ConfigError(f"the model needs {' and '.join(missing)}, which attention does not implement")


ATTENTIONS: dict[str, Callable[[Build, str, Any], Attention]] = {
    MultiHeadDescription.kind: MultiHeadAttention,
    LatentDescription.kind: LatentAttention,
}
"""By `AttentionDescription.kind`. Each takes the layer's name and a dot, and the description."""


def make_attention(build: Build, prefix: str, attention: AttentionDescription) -> Attention:
    """The attention of the layer whose name and a dot are `prefix`."""
    return implementation("attention", attention.kind, ATTENTIONS)(build, prefix, attention)
