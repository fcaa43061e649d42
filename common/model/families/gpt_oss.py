"""gpt-oss: attention sinks, a sliding window in every second layer, and experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace

from common.model.config_file import ConfigFile
from common.model.description import ClampedGate, ExpertNames, LayerDescription
from common.model.families.base import Family, read_attention, read_norm, repeated
from common.model.families.mixtures import read_mixture, read_router
from common.model.families.windows import read_layer_types, window_if_given, with_windows
from common.model.rope import read_rope

_NAMES = ExpertNames(router="mlp.router", is_interleaved=True, is_transposed=True)
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _describe(config: ConfigFile) -> tuple[LayerDescription, ...]:
    bias = config.flag("attention_bias", True)
    attention = read_attention(config, default_kv_heads=8, default_head_dim=64, bias=bias)
    router = read_router(config, "softmax_of_chosen", default_experts=128, default_top_k=4, has_bias=True)
    mixture = read_mixture(config, router, inner_key="intermediate_size", default_inner=2880, bias=True, names=_NAMES)
    clamp = ClampedGate(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0))
    is_given = config.object("rope_scaling") or config.object("rope_parameters")
    layer = LayerDescription(
        replace(attention, has_sinks=True),
        replace(mixture, clamp=clamp),
        read_norm(config),
        read_rope(config, 150000.0, None if is_given else _DEFAULT_ROPE),
    )
    types = read_layer_types(config, lambda number: number % 2 == 0)
    return with_windows(repeated(config, layer), window_if_given(config), types)


GPT_OSS = Family(
    ("GptOssForCausalLM",),
    _describe,
    default_max_position=131072,
    config_defaults={"rms_norm_eps": 1e-5, "sliding_window": 128},
)
