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
from common.model.config import ModelConfig, RopeConfig
from common.model.precision import Precision, can_pack
from common.model.weights import WeightSource

_PACK_ROWS_HINT = 16
"""oneDNN's packed format for so many rows measured well from 1 to 512."""
_PACK_MIN_WEIGHTS = 2**17
"""Below, a oneDNN call's own overhead (30-50 us) outweighs what packing gains."""


@dataclass(frozen=True)
class Build:
    """What building a part needs: shapes, where weights come from, in which dtypes to keep them."""

    config: ModelConfig
    weights: WeightSource
    precision: Precision

    def read(self, name: str, *shape: int) -> Tensor:
        return self.weights.read(name, shape, self.precision.weight)

    def linear(self, names: list[str], out_features: list[int], in_features: int, *, bias: bool) -> Linear:
        """One linear layer of the rows of several named ones, one after the other."""
        weight = torch.cat(
            [self.read(f"{n}.weight", out, in_features) for n, out in zip(names, out_features, strict=True)]
        )
        biases = [self.read(f"{n}.bias", out) for n, out in zip(names, out_features, strict=True)] if bias else None
        return Linear(weight, torch.cat(biases) if biases else None, self.precision)


class Linear:
    """y = x W^T + b. Keeps one copy of W per dtype of `precision.packs`, prepacked by oneDNN where it can."""

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: Precision) -> None:
        self._weights: dict[torch.dtype, tuple[Tensor, Tensor | None, bool]] = {}
        for dtype in precision.packs:
            pack = weight.numel() >= _PACK_MIN_WEIGHTS and can_pack(dtype)
            own = weight.to(dtype)
            kept = torch.ops.mkldnn._reorder_linear_weight(own, _PACK_ROWS_HINT) if pack else own
            self._weights[dtype] = (kept, None if bias is None else bias.to(dtype), pack)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, in], of a dtype in `precision.packs`. Returns a fresh [T, out] of the same dtype."""
        weight, bias, packed = self._weights[x.dtype]
        if packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        return F.linear(x, weight, bias)


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

    def __init__(self, q_weight: Tensor, k_weight: Tensor, config: ModelConfig) -> None:
        q = q_weight.expand(config.num_q_heads, -1)
        k = k_weight.expand(config.num_kv_heads, -1)
        self._weight = torch.cat((q, k)).float()
        self._eps = config.rms_norm_eps

    def forward(self, qk: Tensor) -> Tensor:
        return F.rms_norm(qk.float(), (qk.size(-1),), None, self._eps).mul_(self._weight).to(qk.dtype)


@dataclass(frozen=True)
class RopeStep:
    """One step's rotation: `cos`, and `sin` with its first half negated. Both [T, 1, head_dim]."""

    cos: Tensor
    signed_sin: Tensor


class Rope:
    """Rotary embedding of pairs (i, i + head_dim / 2)."""

    def __init__(self, config: ModelConfig) -> None:
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim)

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
    """Merged q, k, v projection, optional head norm, rope, paged attention, output projection."""

    def __init__(self, build: Build, prefix: str, head_norm: HeadNorm | None = None) -> None:
        config = build.config
        self._heads = (config.num_q_heads, config.num_kv_heads, config.head_dim)
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        sizes = [q_size, kv_size, kv_size]
        self._qkv = build.linear(names, sizes, config.hidden_size, bias=config.attention_bias)
        self._out = build.linear([f"{prefix}.o_proj"], [config.hidden_size], q_size, bias=config.output_bias)
        self._head_norm = head_norm

    def attend(self, x: Tensor, layer: int, rope: RopeStep, backend: AttentionBackend) -> Tensor:
        """Everything up to the output projection; the layer's KV is final when it returns. [T, q_heads * head_dim]."""
        q_heads, kv_heads, head_dim = self._heads
        qkv = self._qkv.forward(x).view(x.size(0), q_heads + 2 * kv_heads, head_dim)
        qk, v = qkv[:, : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]
        if self._head_norm is not None:
            qk = self._head_norm.forward(qk)
        rotate_(qk, rope)
        return backend.forward(layer, qk[:, :q_heads], qk[:, q_heads:], v).flatten(1)

    def project(self, attended: Tensor) -> Tensor:
        return self._out.forward(attended)


class Mlp:
    """down(silu(gate(x)) * up(x)), gate and up merged."""

    def __init__(self, build: Build, prefix: str) -> None:
        inner, hidden, bias = build.config.intermediate_size, build.config.hidden_size, build.config.mlp_bias
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = build.linear(names, [inner, inner], hidden, bias=bias)
        self._down = build.linear([f"{prefix}.down_proj"], [hidden], inner, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up.forward(x).chunk(2, -1)
        return self._down.forward(F.silu(gate).mul_(up))
