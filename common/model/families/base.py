"""The interface of a family of architectures, and how most of them read config.json. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.model.config_file import ConfigFile
from common.model.description import (
    ACTIVATIONS,
    USUAL_ENDS,
    USUAL_NAMES,
    EndsDescription,
    LayerDescription,
    MixtureDescription,
    MlpDescription,
    MultiHeadDescription,
    NormDescription,
    WeightNames,
)
from common.model.rope import read_rope


@dataclass(frozen=True)
class Family:
    """Architectures whose config.json and weights mean the same."""

    architectures: tuple[str, ...]
    """Their names in `architectures` of config.json."""
    describe: Callable[[ConfigFile], tuple[LayerDescription, ...]]
    """The model's layers, first to last. Raises: ConfigError."""
    default_max_position: int
    """`max_position_embeddings` where config.json is silent."""
    weight_names: WeightNames = USUAL_NAMES
    describe_ends: Callable[[ConfigFile], EndsDescription] = lambda config: USUAL_ENDS
    """What is before the first layer and after the last one."""
    default_tied: bool = False
    """`tie_word_embeddings` where config.json is silent."""
    config_keys: dict[str, str] = field(default_factory=dict[str, str])
    """Its own names of usual keys of config.json, by the usual ones."""
    config_defaults: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values of keys that config.json may lack although every model needs them."""
    has_mtp: bool = False
    """Whether its checkpoints may have a layer for multi-token prediction, which is like the last one."""
    nested_config: str | None = None
    """The key of config.json whose object describes the text model, of families that also take images."""


def read_attention(
    config: ConfigFile,
    *,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    bias: bool = False,
    qkv_bias: bool = False,
    has_head_norm: bool = False,
) -> MultiHeadDescription:
    """Full attention with scale 1/sqrt(head_dim). The defaults are the architecture's own, where config.json is silent. `bias`:
    of q, k, v and output; `qkv_bias`: only of the first three."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default_kv_heads or heads)
    head_dim = config.integer("head_dim", default_head_dim or config.integer("hidden_size") // heads)
    if heads % kv_heads:
        raise config.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise config.error(f"head_dim {head_dim} is odd, which rotary embeddings cannot be")
    return MultiHeadDescription(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        scale=1.0 / math.sqrt(head_dim),
        qkv_bias=bias or qkv_bias,
        output_bias=bias,
        head_norm=read_norm(config) if has_head_norm else None,
    )


def read_mlp(
    config: ConfigFile,
    *,
    bias: bool = False,
    kind: str = "gated",
    default_activation: str = "silu",
    default_inner: int | None = None,
) -> MlpDescription:
    """A gated MLP, or one of another `kind`."""
    activation = read_activation(config, default_activation)
    return MlpDescription(config.integer("intermediate_size", default_inner), activation, bias, kind)


def read_activation(config: ConfigFile, default: str = "silu") -> str:
    """`hidden_act`, a key of `ACTIVATIONS`."""
    activation = config.raw.get("hidden_act") or default
    activation = "silu" if activation == "swish" else activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise config.error(f"hidden_act {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return activation


def read_norm(config: ConfigFile, default_eps: float = 1e-6) -> NormDescription:
    """An RMS norm."""
    return NormDescription(config.number("rms_norm_eps", default_eps))


def repeat_layer(
    config: ConfigFile, attention: MultiHeadDescription, mlp: MlpDescription | MixtureDescription
) -> tuple[LayerDescription, ...]:
    """All layers alike, with the norm of `read_norm` and the rotary embedding of `read_rope`."""
    return repeated(config, LayerDescription(attention, mlp, read_norm(config), read_rope(config)))


def repeated(config: ConfigFile, layer: LayerDescription) -> tuple[LayerDescription, ...]:
    """As many layers as config.json says, all alike."""
    return (layer,) * config.num_layers()
