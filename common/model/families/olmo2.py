"""OLMo 2: norms after attention and MLP, and over all heads of q and of k together."""

from __future__ import annotations

from dataclasses import replace

from common.model.config_file import ConfigFile
from common.model.description import LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, read_norm, repeated
from common.model.rope import read_rope


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    norm = read_norm(config, 1e-5)
    attention = replace(read_attention(config, bias=config.flag("attention_bias", False)), joint_norm=norm)
    layer = LayerDescription(attention, read_mlp(config), norm, read_rope(config), norm_at="output")
    return repeated(config, layer)


OLMO2 = Family(("Olmo2ForCausalLM",), _describe, default_max_position=2048)
