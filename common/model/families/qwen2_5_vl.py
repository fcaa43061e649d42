"""The text part of Qwen2.5-VL: as Qwen2. Its multimodal rope gives tokens of text the angles of plain rope."""

from __future__ import annotations

from dataclasses import replace

from common.model.config_file import ConfigFile
from common.model.description import USUAL_NAMES, LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, read_norm, repeated
from common.model.families.windows import with_windows_in_later_layers
from common.model.rope import read_rope


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    attention = read_attention(config, default_kv_heads=8, qkv_bias=True)
    layer = LayerDescription(attention, read_mlp(config), read_norm(config, 1e-5), read_rope(config, 1e6))
    return with_windows_in_later_layers(config, repeated(config, layer), default_first=80)


QWEN2_5_VL_TEXT_PART = Family(
    ("Qwen2_5_VLForConditionalGeneration",),
    _describe,
    default_max_position=32768,
    weight_names=replace(USUAL_NAMES, other_beginnings=(("model.", "model.language_model."),)),
    nested_config="text_config",
)
