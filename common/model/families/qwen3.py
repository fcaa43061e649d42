"""Qwen3, dense: as Qwen2, without its biases, with an RMS norm over each head of q and k before rope."""

from __future__ import annotations

from common.model.config_file import ConfigFile
from common.model.description import LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, repeat_layer
from common.model.families.windows import with_windows_in_later_layers


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    bias = config.flag("attention_bias", False)
    attention = read_attention(
        config, default_kv_heads=32, default_head_dim=128, qkv_bias=bias, output_bias=bias, has_head_norm=True
    )
    return with_windows_in_later_layers(config, repeat_layer(config, attention, read_mlp(config)), default_first=28)


QWEN3 = Family(("Qwen3ForCausalLM",), _describe, default_max_position=32768)
