"""SmolLM3: as Llama, but every fourth layer has no rotary embedding, and a sliding window
where windows are switched on."""

from __future__ import annotations

from dataclasses import replace

from common.model.config_file import ConfigFile, as_list
from common.model.description import LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, read_norm, repeated
from common.model.families.windows import read_layer_types, window_if_given, with_windows
from common.model.rope import read_rope


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    attention = read_attention(config, default_kv_heads=4, bias=config.flag("attention_bias", False))
    mlp = read_mlp(config, bias=config.flag("mlp_bias", False))
    rotated = LayerDescription(attention, mlp, read_norm(config), read_rope(config, default_theta=2e6))
    layers = repeated(config, rotated)
    rotates = _rotated_layers(config, len(layers))
    layers = tuple(layer if rotates[number] else replace(layer, rope=None) for number, layer in enumerate(layers))
    window = window_if_given(config) if config.flag("use_sliding_window", False) else None
    return with_windows(layers, window, read_layer_types(config, lambda number: not rotates[number]))


def _rotated_layers(config: ConfigFile, num_layers: int) -> list[bool]:
    given = config.raw.get("no_rope_layers")
    if given is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return [(number + 1) % interval != 0 for number in range(num_layers)]
    # Despite its name, the list says which layers have one.
    if len(as_list(given)) != num_layers:
        raise config.error(f"no_rope_layers is not a list of {num_layers} numbers, 0 or 1")
    return [bool(each) for each in given]


SMOLLM3 = Family(("SmolLM3ForCausalLM",), _describe, default_max_position=32768, default_tied=True)
