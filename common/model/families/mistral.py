"""Mistral: as Llama, without biases; contexts are limited to its sliding window."""

from __future__ import annotations

from common.model.config_file import ConfigFile
from common.model.description import LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, read_window, repeat_layer


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    return repeat_layer(config, read_attention(config, default_kv_heads=8), read_mlp(config))


MISTRAL = Family(("MistralForCausalLM",), _describe, default_max_position=131072, read_window=read_window)
