"""The parts of a decoder layer, built from their descriptions. Runs on a rank's engine thread, under inference mode.

Parts are built complete, from a `WeightSource`; there is no uninitialised state. They are plain classes:
at one token a step, an eager operation costs 5 us and more, and a module's call hooks would add to each.
Activations of one step have the dtype that `Precision.for_rows` gives; each part follows its input's dtype.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from common.attention.base import AttentionBackend
from common.base.errors import ConfigError
from common.kernels.base import Kernels, Rotation
from common.model.build import Build, Share
from common.model.description import ACTIVATIONS, AttentionDescription, MlpDescription, NormDescription
from common.model.rope import RopeConfig
from common.model.sharding import HeadRange, vocab_range


class RMSNorm:
    """Root-mean-square norm over the last axis."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        self.weight = kernels.norm_weight(weight)
        self.eps = eps
        self._kernels = kernels

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """The norm of `x`, to which `delta` is added in place before; may overwrite `delta`. Both [T, hidden]."""
        if delta is None:
            return self._kernels.rms_norm(x, self.weight, self.eps)
        return self._kernels.add_rms_norm_(delta, x, self.weight, self.eps)


NORMS = {"rms": RMSNorm}
"""Norms over hidden states, by `NormDescription.kind`."""


def make_norm(build: Build, name: str, norm: NormDescription) -> RMSNorm:
    """The norm over hidden states whose weight is `name`.weight."""
    weight = build.read(f"{name}.weight", build.config.hidden_size)
    return implementation("norm", norm.kind, NORMS)(weight, norm.eps, build.kernels)


class HeadNorm:
    """RMS norm over each head of q and k, which lie side by side: [T, q_heads + kv_heads, head_dim]."""

    def __init__(self, q_weight: Tensor, k_weight: Tensor, heads: HeadRange, eps: float, kernels: Kernels) -> None:
        self.weights = kernels.head_weights(q_weight, k_weight, heads.num_q, heads.num_kv)
        self.eps = eps
        self._num_q = heads.num_q
        self._kernels = kernels

    def forward(self, qk: Tensor) -> Tensor:
        return self._kernels.norm_heads(qk, self.weights, self._num_q, self.eps)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2], float32. Source: "llama3" is the scaling of Llama 3.1's reference code."""
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "factors":
        if len(rope.factors) != inv_freq.numel():
            raise ConfigError(f"the model gives {len(rope.factors)} rope factors for {inv_freq.numel()} frequencies")
        return inv_freq / torch.tensor(rope.factors)
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

    def __init__(self, build: Build, prefix: str, attention: AttentionDescription) -> None:
        """`prefix`: the layer's name and a dot. Raises: ConfigError for what has no implementation."""
        _check_implemented(attention)
        hidden, names, heads = build.config.hidden_size, build.names, build.heads(attention)
        dim = attention.head_dim
        self.heads = (heads.num_q, heads.num_kv, dim)
        self.scale = attention.scale
        q = Share(attention.num_q_heads * dim, heads.q_lo * dim, heads.q_hi * dim)
        kv = Share(attention.num_kv_heads * dim, heads.kv_lo * dim, heads.kv_hi * dim)
        merged = [prefix + name for name in (names.q, names.k, names.v)]
        self.qkv = build.column_linear(merged, [q, kv, kv], hidden, bias=attention.qkv_bias)
        self.out = build.row_linear(prefix + names.output, q, hidden, bias=attention.output_bias)
        self.head_norm: HeadNorm | None = None
        if attention.head_norm is not None:
            q_weight, k_weight = (build.read(f"{prefix}{name}.weight", dim) for name in (names.q_norm, names.k_norm))
            self.head_norm = HeadNorm(q_weight, k_weight, heads, attention.head_norm.eps, build.kernels)
        self._mesh = build.mesh

    def attend(self, x: Tensor, layer: int, rope: Rotation, backend: AttentionBackend) -> Tensor:
        """Everything up to the output projection; the layer's KV is final when it returns.

        Returns [T, q_heads/tp * head_dim].
        """
        q_heads, kv_heads, head_dim = self.heads
        qkv = self.qkv.forward(x).view(x.size(0), q_heads + 2 * kv_heads, head_dim)
        qk, v = qkv[:, : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]
        if self.head_norm is not None:
            qk = self.head_norm.forward(qk)
        rope.rotate_(qk, q_heads)
        return backend.forward(layer, qk[:, :q_heads], qk[:, q_heads:], v).flatten(1)

    def project(self, attended: Tensor) -> Tensor:
        """[T, hidden], after an all-reduce: the sum over all heads of the model."""
        return self._mesh.all_reduce(self.out.forward(attended))


def _check_implemented(attention: AttentionDescription) -> None:
    """Raises: ConfigError naming what attention has no implementation of."""
    missing = {
        f"heads of v of another width ({attention.v_head_dim}) than those of k ({attention.head_dim})": (
            attention.v_head_dim != attention.head_dim
        ),
        f"a sliding window ({attention.window} tokens)": attention.window is not None,
        f"a soft cap of scores ({attention.soft_cap})": attention.soft_cap is not None,
        "attention sinks": attention.has_sinks,
        f"a {attention.head_norm and attention.head_norm.kind!r} norm of heads": (
            attention.head_norm is not None and attention.head_norm.kind != "rms"
        ),
    }
    for what, is_asked_for in missing.items():
        if is_asked_for:
            raise ConfigError(f"the model needs {what}, which attention does not implement")


class GatedMlp:
    """down(activation(gate(x)) * up(x)), gate and up merged; this rank's inner features, then an all-reduce."""

    def __init__(self, build: Build, prefix: str, mlp: MlpDescription) -> None:
        """`prefix`: the layer's name and a dot."""
        hidden, names, inner = build.config.hidden_size, build.names, build.inner(mlp)
        merged = [prefix + name for name in (names.gate, names.up)]
        self.activation = mlp.activation
        self.gate_up = build.column_linear(merged, [inner, inner], hidden, bias=mlp.bias, is_paired=True)
        self.down = build.row_linear(prefix + names.down, inner, hidden, bias=mlp.bias)
        self._activate_and_mul = implementation("activation", mlp.activation, ACTIVATIONS)(build.kernels)
        self._mesh = build.mesh

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        return self._mesh.all_reduce(self.down.forward(self._activate_and_mul(self.gate_up.forward(x))))


class Embedding:
    """Token ids to hidden states. Each rank of the stage holds a range of the ids; an all-reduce adds up the ranks' rows."""

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


class LMHead:
    """Hidden states to logits; each rank of the stage computes those of its range of the vocabulary."""

    def __init__(self, build: Build, name: str, tied: Tensor | None) -> None:
        """`name`: of the matrix. tied: [vocab_rows, hidden], the embedding where that is the same matrix."""
        self._mesh = build.mesh
        self._linear = build.lm_head_linear(name, tied)
        self._vocab_size = build.config.vocab_size

    def forward(self, x: Tensor) -> Tensor | None:
        """x: [rows, hidden]. Returns [rows, vocab] float32 on the stage's `tp_rank` 0, None on the others."""
        logits = self._mesh.gather_columns(self._linear.forward(x, torch.float32))
        return None if logits is None else logits[:, : self._vocab_size]


MLPS = {"gated": GatedMlp}
"""By `MlpDescription.kind`."""

_T = TypeVar("_T")


def implementation(what: str, kind: str, known: dict[str, _T]) -> _T:
    """The entry of `known` that a description asks for by name. Raises: ConfigError if there is none."""
    if kind not in known:
        raise ConfigError(
            f"the model needs the {what} {kind!r}, which is not implemented; implemented: {', '.join(known)}"
        )
    return known[kind]
