"""The parts that all supported families share. Runs on a rank's engine thread, under inference mode.

Parts are built complete, from a `WeightSource`; there is no uninitialised state. They are plain classes:
at one token a step, an eager operation costs 5 us and more, and a module's call hooks would add to each.
Activations of one step have the dtype that `Precision.for_rows` gives; each part follows its input's dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.attention.base import AttentionBackend
from common.device import CPU
from common.model.build import Build, Share
from common.model.config import ModelConfig, RopeConfig
from common.model.linear import Linear
from common.parallel.split import HeadRange, vocab_range


class RMSNorm:
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight.float()
        self._shape = tuple(weight.shape)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self._shape, self._weight, self._eps).to(x.dtype)


class HeadNorm:
    """RMS norm over each head of q and k, which lie side by side: [T, q_heads + kv_heads, head_dim]."""

    def __init__(self, q_weight: Tensor, k_weight: Tensor, heads: HeadRange, eps: float) -> None:
        q = q_weight.expand(heads.num_q, -1)
        k = k_weight.expand(heads.num_kv, -1)
        self._weight = torch.cat((q, k)).float()
        self._eps = eps

    def forward(self, qk: Tensor) -> Tensor:
        return F.rms_norm(qk.float(), (qk.size(-1),), None, self._eps).mul_(self._weight).to(qk.dtype)


@dataclass(frozen=True)
class RopeStep:
    """One step's rotation: `cos`, and `sin` with its first half negated. Both [T, 1, head_dim]."""

    cos: Tensor
    signed_sin: Tensor


class Rope:
    """Rotary embedding of pairs (i, i + head_dim / 2)."""

    def __init__(self, config: ModelConfig, device: torch.device = CPU) -> None:
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)

    def step(self, positions: Tensor, dtype: torch.dtype) -> RopeStep:
        """The rotation of one step, shared by all layers. positions: [T] int64."""
        angles = positions[:, None, None].float() * self._inv_freq
        cos, sin = angles.cos(), angles.sin()
        return RopeStep(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))


def rotate_(x: Tensor, step: RopeStep) -> Tensor:
    """Rotate x [T, heads, head_dim] in place."""
    swapped = torch.roll(x, x.size(-1) // 2, -1)
    return x.mul_(step.cos).addcmul_(swapped, step.signed_sin)


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

    def attend(self, x: Tensor, layer: int, rope: RopeStep, backend: AttentionBackend) -> Tensor:
        """Everything up to the output projection; the layer's KV is final when it returns.

        Returns [T, q_heads/tp * head_dim].
        """
        q_heads, kv_heads, head_dim = self._heads
        qkv = self._qkv.forward(x).view(x.size(0), q_heads + 2 * kv_heads, head_dim)
        qk, v = qkv[:, : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]
        if self._head_norm is not None:
            qk = self._head_norm.forward(qk)
        rotate_(qk, rope)
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
        self._mesh = build.mesh

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up.forward(x).chunk(2, -1)
        return self._mesh.all_reduce(self._down.forward(F.silu(gate).mul_(up)))


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
