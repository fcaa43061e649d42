"""Phi-3 and Phi-4, mini and medium: as Llama, with merged weights, part of each head rotated, and longrope."""

from __future__ import annotations

from dataclasses import replace

from common.model.config_file import ConfigFile
from common.model.description import USUAL_NAMES, LayerDescription
from common.model.families.base import Family, read_attention, read_mlp, read_norm, repeated
from common.model.families.windows import window_if_given, with_windows
from common.model.rope import read_rope

_QKV, _GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
_NAMES = replace(USUAL_NAMES, q=_QKV, k=_QKV, v=_QKV, gate=_GATE_UP, up=_GATE_UP)


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    norm = read_norm(config, 1e-5)
    rope = read_rope(config, default_in_part=True)
    layer = LayerDescription(read_attention(config), read_mlp(config), norm, rope)
    return with_windows(repeated(config, layer), window_if_given(config))


PHI3 = Family(
    ("Phi3ForCausalLM",),
    _describe,
    default_max_position=4096,
    weight_names=_NAMES,
    config_defaults={"original_max_position_embeddings": 4096},
)
