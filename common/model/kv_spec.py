"""The KV that a model caches, derived from the description of its layers. No torch."""

from __future__ import annotations

from common.kv.spec import KVPlane, KVSpec, LayerGroup
from common.model.config import ModelConfig


def kv_spec(config: ModelConfig, dtype: str) -> KVSpec:
    """K and V over the KV heads; layers that cache the same planes and have the same sliding window are one group.

    `dtype`: of the KV cache, a key of `common.kv.spec.DTYPE_BYTES`. Raises: ConfigError.
    """
    members: dict[tuple[int, int, int, int | None], list[int]] = {}
    for number, layer in enumerate(config.layers):
        attention = layer.attention
        kept = attention.head_dim, attention.v_head_dim, attention.num_kv_heads, attention.window
        members.setdefault(kept, []).append(number)
    return KVSpec(
        tuple(
            LayerGroup(tuple(layers), (KVPlane("k", k_width), KVPlane("v", v_width)), num_heads, dtype, window)
            for (k_width, v_width, num_heads, window), layers in members.items()
        )
    )
