"""Description of a decoder layer: what it computes and how its weights are named. Families fill it in, and
`common.model.layers` builds from it.

A value that has no implementation is refused when the model loads. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.model.rope import RopeConfig

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")
"""Activations of an MLP, by their names in config.json; `common.model.mlp` implements them."""


@dataclass(frozen=True)
class NormDescription:
    """A norm over hidden states. Implemented kinds: `common.model.norms.NORMS`."""

    eps: float
    kind: str = "rms"
    weight_offset: float = 0.0
    """What an RMS norm adds to its stored weights."""


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
    joint_norm: NormDescription | None = None
    """Norm over all heads of q together, and over all of k, before rope."""
    window: int | None = None
    """Tokens that a row can see; None: all before it."""
    soft_cap: float | None = None
    """c in c * tanh(score / c)."""
    has_sinks: bool = False
    """One learned logit per query head takes part in the softmax."""


@dataclass(frozen=True)
class MlpDescription:
    """The MLP of a layer. Implemented kinds: `common.model.mlp.MLPS`."""

    inner_size: int
    activation: str
    """A key of `ACTIVATIONS`."""
    bias: bool = False
    kind: str = "gated"


@dataclass(frozen=True)
class LayerDescription:
    """x + attention(norm(x)), then x + mlp(norm(x)), where `norm_at` is "input"."""

    attention: AttentionDescription
    mlp: MlpDescription
    norm: NormDescription
    rope: RopeConfig | None = None
    """How q and k are rotated; None: not at all."""
    norm_at: Literal["input", "output", "both"] = "input"
    """Whether norms are over the inputs of attention and MLP, over their outputs, before these are added to x, or both."""
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and MLP."""


@dataclass(frozen=True)
class PositionsDescription:
    """A matrix [rows, hidden]; row (position + offset) is added to a token's embedding."""

    rows: int
    offset: int = 0


@dataclass(frozen=True)
class EndsDescription:
    """What is before the first layer and after the last one."""

    embedding_multiplier: float = 1.0
    is_multiplier_rounded: bool = False
    """Whether `embedding_multiplier` is rounded to the weights' dtype."""
    positions: PositionsDescription | None = None
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    """c in c * tanh(logit / c)."""


@dataclass(frozen=True)
class WeightNames:
    """Names of modules in a checkpoint; their tensors add `.weight` and `.bias`. Names of a layer's parts follow `layer`.

    Equal names of q, k and v, or of gate and up, mean that one tensor holds them, one after the other.
    """

    embedding: str = "model.embed_tokens"
    positions: str = "model.embed_positions"
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
    attention_output_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = "post_feedforward_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    is_transposed: bool = False
    """Whether weights of linear layers are stored [in, out]."""
    other_beginnings: tuple[tuple[str, str], ...] = ()
    """(beginning of names, what some checkpoints have in its place)."""


USUAL_NAMES = WeightNames()
USUAL_ENDS = EndsDescription()
