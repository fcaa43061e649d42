"""Description of a decoder layer: what it computes and how its weights are named. Families fill it in, and
`common.model.layers` builds from it.

A value that has no implementation is refused when the model loads. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ACTIVATIONS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {"silu": lambda kernels: kernels.silu_and_mul}
"""Activations of a gated MLP, by their `hidden_act` in config.json. Each takes the device's `Kernels` and returns what makes
activation(gate) * up, [T, inner], of [T, 2 * inner]."""


@dataclass(frozen=True)
class NormDescription:
    """A norm over hidden states. Implemented kinds: `common.model.layers.NORMS`."""

    eps: float
    kind: str = "rms"


@dataclass(frozen=True)
class AttentionDescription:
    """The attention of a layer, over the whole model's heads."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    """Head dimension of q and k."""
    v_head_dim: int
    scale: float
    """Factor of the products of queries and keys."""
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: NormDescription | None = None
    """Norm over each head of q and k, before rope."""
    window: int | None = None
    """Tokens that a row can see; None: all before it."""
    soft_cap: float | None = None
    """c in c * tanh(score / c)."""
    has_sinks: bool = False
    """One learned logit per query head takes part in the softmax."""


@dataclass(frozen=True)
class MlpDescription:
    """The MLP of a layer. Implemented kinds: `common.model.layers.MLPS`."""

    inner_size: int
    activation: str
    """A key of `ACTIVATIONS`."""
    bias: bool = False
    kind: str = "gated"


@dataclass(frozen=True)
class LayerDescription:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    attention: AttentionDescription
    mlp: MlpDescription
    norm: NormDescription


@dataclass(frozen=True)
class WeightNames:
    """Names of modules in a checkpoint; their tensors add `.weight` and `.bias`. Names of a layer's parts follow `layer`."""

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{number}"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"


USUAL_NAMES = WeightNames()
