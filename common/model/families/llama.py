"""Llama 2 and 3, TinyLlama: the plain decoder, with biases where config.json says so."""

from __future__ import annotations

from common.model.config_file import ConfigFile
from common.model.description import LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, repeat_layer


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    attention = read_attention(config, bias=config.flag("attention_bias", False))
    return repeat_layer(config, attention, read_mlp(config, bias=config.flag("mlp_bias", False)))


LLAMA = Family(("LlamaForCausalLM",), _describe, default_max_position=2048)
