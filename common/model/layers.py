"""The parts that all supported families share. Runs on a rank's engine thread, under inference mode.

Parts are built complete, from a `WeightSource`; there is no uninitialised state. They are plain classes:
at one token a step, an eager operation costs 5 us and more, and a module's call hooks would add to each.
Activations of one step have the dtype that `Precision.for_rows` gives; each part follows its input's dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.attention.base import AttentionBackend
from common.kernels.base import Kernels, Rotation
from common.model.build import Build, Share
from common.model.config import RopeConfig
from common.model.formats.linear import Linear
from common.model.sharding import HeadRange, vocab_range


class RMSNorm:
    """Root-mean-square norm over the last axis."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        self._weight = kernels.norm_weight(weight)
        self._eps = eps
        self._kernels = kernels

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """The norm of `x`, to which `delta` is added in place before; may overwrite `delta`. Both [T, hidden]."""
        if delta is None:
            return self._kernels.rms_norm(x, self._weight, self._eps)
        return self._kernels.add_rms_norm_(delta, x, self._weight, self._eps)


class HeadNorm:
    """RMS norm over each head of q and k, which lie side by side: [T, q_heads + kv_heads, head_dim]."""

    def __init__(self, q_weight: Tensor, k_weight: Tensor, heads: HeadRange, eps: float, kernels: Kernels) -> None:
        self._weights = kernels.head_weights(q_weight, k_weight, heads.num_q, heads.num_kv)
        self._num_q = heads.num_q
        self._eps = eps
        self._kernels = kernels

    def forward(self, qk: Tensor) -> Tensor:
        return self._kernels.norm_heads(qk, self._weights, self._num_q, self._eps)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2], float32. Source: "llama3" is the scaling of Llama 3.1's reference code."""
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind != "llama3":
        return inv_freq
    wavelength = 2 * math.pi / inv_freq
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelength > low_wavelength, inv_freq / rope.factor, inv_freq)
    middle = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(middle, blended, scaled)


class Attention:
    """Merged q, k, v projection, optional head norm, rope, paged attention, output projection; this rank's heads."""

    def __init__(self, build: Build, prefix: str, head_norm: HeadNorm | None = None) -> None:
        config, heads = build.config, build.heads
        dim = config.head_dim
        self._heads = (heads.num_q, heads.num_kv, dim)
        q = Share(config.num_q_heads * dim, heads.q_lo * dim, heads.q_hi * dim)
        kv = Share(config.num_kv_heads * dim, heads.kv_lo * dim, heads.kv_hi * dim)
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        self._qkv = build.column_linear(names, [q, kv, kv], config.hidden_size, bias=config.attention_bias)
        self._out = build.row_linear(f"{prefix}.o_proj", q, config.hidden_size, bias=config.output_bias)
        self._head_norm = head_norm
        self._mesh = build.mesh

    def attend(self, x: Tensor, layer: int, rope: Rotation, backend: AttentionBackend) -> Tensor:
        """Everything up to the output projection; the layer's KV is final when it returns.

        Returns [T, q_heads/tp * head_dim].
        """
        q_heads, kv_heads, head_dim = self._heads
        qkv = self._qkv.forward(x).view(x.size(0), q_heads + 2 * kv_heads, head_dim)
        qk, v = qkv[:, : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]
        if self._head_norm is not None:
            qk = self._head_norm.forward(qk)
        rope.rotate_(qk, q_heads)
        return backend.forward(layer, qk[:, :q_heads], qk[:, q_heads:], v).flatten(1)

    def project(self, attended: Tensor) -> Tensor:
        """[T, hidden], the sum over all heads of the model."""
        return self._mesh.all_reduce(self._out.forward(attended))


class Mlp:
    """down(silu(gate(x)) * up(x)), gate and up merged; this rank's inner features, summed over the ranks."""

    def __init__(self, build: Build, prefix: str) -> None:
        hidden, bias = build.config.hidden_size, build.config.mlp_bias
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = build.column_linear(names, [build.inner, build.inner], hidden, bias=bias)
        self._down = build.row_linear(f"{prefix}.down_proj", build.inner, hidden, bias=bias)
        self._kernels = build.kernels
        self._mesh = build.mesh

    def forward(self, x: Tensor) -> Tensor:
        inner = self._kernels.silu_and_mul(self._gate_up.forward(x))
        return self._mesh.all_reduce(self._down.forward(inner))


class Embedding:
    """Token ids to hidden states. Each rank of the stage holds a range of the ids and adds nothing for the others."""

    def __init__(self, build: Build, weight: Tensor) -> None:
        """weight: [vocab_rows, hidden], of `Build.vocabulary`."""
        place = build.mesh.place
        self._mesh = build.mesh
        self._weight = weight
        self._lo, self._hi = vocab_range(build.config.vocab_size, place.tp_size, place.tp_rank)
        self._is_whole = place.tp_size == 1

    def forward(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """token_ids: [T] int64, all in the vocabulary. Returns a fresh [T, hidden] of `dtype`."""
        if self._is_whole:
            return self._weight.index_select(0, token_ids).to(dtype)
        elsewhere = (token_ids < self._lo) | (token_ids >= self._hi)
        rows = (token_ids - self._lo).masked_fill_(elsewhere, 0)
        x = self._weight.index_select(0, rows).to(dtype).masked_fill_(elsewhere[:, None], 0.0)
        return self._mesh.all_reduce(x)


class Head:
    """Hidden states to logits, each rank of the stage those of its range of the vocabulary."""

    def __init__(self, build: Build, weight: Tensor) -> None:
        """weight: [vocab_rows, hidden], of `Build.vocabulary`."""
        self._mesh = build.mesh
        self._linear = Linear(weight, None, build.precision)
        self._vocab_size = build.config.vocab_size

    def forward(self, x: Tensor) -> Tensor | None:
        """x: [rows, hidden]. Returns [rows, vocab] float32 on the stage's `tp_rank` 0, None on the others."""
        logits = self._mesh.gather_columns(self._linear.forward(x).float())
        return None if logits is None else logits[:, : self._vocab_size]
