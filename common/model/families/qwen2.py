"""Qwen2 and Qwen2.5, dense: as Llama, with biases on q, k and v only."""

from __future__ import annotations

from common.model.config_file import ConfigFile
from common.model.description import LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, repeat_layer, window_if_switched_on


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    return repeat_layer(config, read_attention(config, default_kv_heads=32, qkv_bias=True), read_mlp(config))


QWEN2 = Family(("Qwen2ForCausalLM",), _describe, default_max_position=32768, read_window=window_if_switched_on)
