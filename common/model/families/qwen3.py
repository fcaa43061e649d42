"""Qwen3, dense: as Llama, with an RMS norm over each head of q and k before rope."""

from __future__ import annotations

from common.model.config_file import ConfigFile
from common.model.description import LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, repeat_layer, window_if_switched_on


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    bias = config.flag("attention_bias", False)
    attention = read_attention(
        config, default_kv_heads=32, default_head_dim=128, qkv_bias=bias, output_bias=bias, has_head_norm=True
    )
    return repeat_layer(config, attention, read_mlp(config))


QWEN3 = Family(("Qwen3ForCausalLM",), _describe, default_max_position=32768, read_window=window_if_switched_on)
