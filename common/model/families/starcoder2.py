"""StarCoder2: layer norms with bias, a plain MLP, biases, with a sliding window in all layers."""

from __future__ import annotations

from dataclasses import replace

from common.model.config_file import ConfigFile
from common.model.description import USUAL_NAMES, LayerDescription, NormDescription
from common.model.families.base import Family, read_attention, read_mlp, repeated
from common.model.families.windows import window_if_given, with_windows
from common.model.rope import read_rope


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    bias = config.flag("use_bias", True)
    attention = read_attention(config, default_kv_heads=2, bias=bias)
    mlp = read_mlp(config, bias=bias, kind="plain", default_activation="gelu_pytorch_tanh")
    norm = NormDescription(config.number("norm_epsilon", 1e-5), "layer")
    layers = repeated(config, LayerDescription(attention, mlp, norm, read_rope(config)))
    return with_windows(layers, window_if_given(config))


STARCODER2 = Family(
    ("Starcoder2ForCausalLM",),
    _describe,
    default_max_position=4096,
    weight_names=replace(USUAL_NAMES, up="mlp.c_fc", down="mlp.c_proj"),
    default_tied=True,
)
