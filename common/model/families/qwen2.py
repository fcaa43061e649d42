"""Qwen2 and Qwen2.5, dense: as Llama, with biases on q, k and v only, and sliding windows in later layers where switched on."""

from __future__ import annotations

from common.model.config_file import ConfigFile
from common.model.description import LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, repeat_layer
from common.model.families.windows import with_windows_in_later_layers


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    layers = repeat_layer(config, read_attention(config, default_kv_heads=32, qkv_bias=True), read_mlp(config))
    return with_windows_in_later_layers(config, layers, default_first=28)


QWEN2 = Family(("Qwen2ForCausalLM",), _describe, default_max_position=32768)
