"""What is read from the published configs of DeepSeek and Kimi, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from common.base.errors import ConfigError
from common.kv.spec import KVPlane
from common.model.config import load_model_config
from common.model.description import MixtureDescription
from common.model.kv_spec import kv_spec
from common.model.latent_description import LatentDescription

_YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096}
_HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    **_HEADS,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "vocab_size": 102_400,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 163_840,
    "rope_theta": 10000,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
R1: dict[str, Any] = {
    **V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
KIMI_K2: dict[str, Any] = {
    **R1,
    "num_attention_heads": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0,
    "rope_scaling": {**_YARN, "factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("raw", "heads", "q_latent", "mscale", "dense", "experts", "groups"),
    [
        (V2_LITE, 16, None, 0.1 * 0.707 * math.log(40) + 1, 1, (64, 6, 2 * 1408), (1, 1)),
        (R1, 128, 1536, 0.1 * math.log(40) + 1, 3, (256, 8, 2048), (8, 4)),
        (KIMI_K2, 64, 1536, 0.1 * math.log(32) + 1, 1, (384, 8, 2048), (1, 1)),
    ],
    ids=["V2-Lite", "R1", "Kimi K2"],
)
def test_published_configs_are_read(
    tmp_path: Path,
    raw: dict[str, Any],
    heads: int,
    q_latent: int | None,
    mscale: float,
    dense: int,
    experts: tuple[int, int, int],
    groups: tuple[int, int],
) -> None:
    config = load_model_config(write(tmp_path, raw))
    attention, rope = config.layers[0].attention, config.layers[0].rope
    assert isinstance(attention, LatentDescription)
    assert (attention.num_heads, attention.q_latent_dim, attention.has_adjacent_pairs) == (heads, q_latent, True)
    assert attention.scale == pytest.approx(mscale**2 / math.sqrt(192))
    assert rope is not None
    assert (rope.kind, rope.attention_factor) == ("yarn", 1.0)
    mixtures = [layer.mlp for layer in config.layers if isinstance(layer.mlp, MixtureDescription)]
    assert len(mixtures) == config.num_layers - dense
    router = mixtures[0].router
    assert (router.num_experts, router.top_k, mixtures[0].shared_inner_size) == experts
    assert (router.num_groups, router.groups_kept) == groups
    assert router.scaling == raw["routed_scaling_factor"]
    assert router.has_selection_bias == (raw is not V2_LITE)


def test_a_token_takes_a_latent_and_a_rotated_key_in_each_layer(tmp_path: Path) -> None:
    spec = kv_spec(load_model_config(write(tmp_path, V2_LITE)), "bfloat16")
    assert [(group.planes, group.num_heads) for group in spec.groups] == [((KVPlane("latent", 576),), 1)]
    assert spec.bytes_per_token == 27 * 576 * 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention_bias": True}, "attention_bias is not supported with latent attention"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
        ({"topk_method": "random"}, "topk_method 'random' is not supported"),
        ({"topk_method": "group_limited_greedy", "n_group": 5}, "n_group 5 does not divide the 64 experts"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_sentence(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_model_config(write(tmp_path, {**V2_LITE, **change}))
