"""Mistral: as Llama, without biases, with a sliding window in all layers, or in those that `layer_types` names (Ministral)."""

from __future__ import annotations

from common.model.config_file import ConfigFile
from common.model.description import LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, repeat_layer
from common.model.families.windows import read_layer_types, window_by_default, with_windows


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    layers = repeat_layer(config, read_attention(config, default_kv_heads=8), read_mlp(config))
    types = read_layer_types(config, lambda number: True)
    return with_windows(layers, window_by_default(config), types)


MISTRAL = Family(("MistralForCausalLM",), _describe, default_max_position=131072)
