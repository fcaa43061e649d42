"""The router function against the router module of each family in transformers, and the groups that a config may name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from common.base.errors import ConfigError
from common.model.config_file import ConfigFile
from common.model.description import RouterDescription
from common.model.families.mixtures import read_biased_router, read_router, with_groups
from common.model.mixture.routing import route

EXPERTS, TOP_K, HIDDEN = 16, 4, 24
_SIZES: dict[str, Any] = {"num_experts_per_tok": TOP_K, "hidden_size": HIDDEN, "num_attention_heads": 2}
_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_routed_experts": EXPERTS}


def _v2_groups(config: ConfigFile) -> RouterDescription:
    return with_groups(config, read_router(config), score_of=1)


CASES: dict[str, tuple[Any, Any, Callable[[ConfigFile], RouterDescription]]] = {
    "mixtral": (
        MixtralTopKRouter,
        MixtralConfig(**_SIZES, num_local_experts=EXPERTS),
        lambda config: read_router(config, normalizes=True),
    ),
    "qwen3-moe": (Qwen3MoeTopKRouter, Qwen3MoeConfig(**_SIZES, num_experts=EXPERTS), read_router),
    "qwen3-moe normalized": (
        Qwen3MoeTopKRouter,
        Qwen3MoeConfig(**_SIZES, num_experts=EXPERTS, norm_topk_prob=True),
        lambda config: read_router(config, normalizes=True),
    ),
    "gpt-oss": (
        GptOssTopKRouter,
        GptOssConfig(**_SIZES, num_local_experts=EXPERTS),
        lambda config: read_router(config, "softmax_of_chosen", has_bias=True),
    ),
    "granite-moe": (
        GraniteMoeTopKRouter,
        GraniteMoeConfig(**_SIZES, num_local_experts=EXPERTS),
        lambda config: read_router(config, "softmax_of_chosen"),
    ),
    "deepseek-v2-lite": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(**_SIZES, **{**_GROUPS, "n_group": 1, "topk_group": 1}, topk_method="greedy"),
        _v2_groups,
    ),
    "deepseek-v2": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(**_SIZES, **_GROUPS, topk_method="group_limited_greedy"),
        _v2_groups,
    ),
    "deepseek-v3": (
        DeepseekV3TopkRouter,
        DeepseekV3Config(**_SIZES, **_GROUPS),
        lambda config: read_biased_router(config, 256),
    ),
    "glm4-moe": (
        Glm4MoeTopkRouter,
        Glm4MoeConfig(**_SIZES, **_GROUPS, norm_topk_prob=False),
        lambda config: read_biased_router(config, 128),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_experts_and_weights_are_those_of_transformers_own_router(name: str) -> None:
    make, config, describe = CASES[name]
    generator = torch.Generator().manual_seed(3)
    theirs: Any = make(config)
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *theirs.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 2)
        x = torch.randn(300, HIDDEN, generator=generator)
        _, weights, experts = theirs(x)
    router = describe(ConfigFile(Path("config.json"), json.loads(config.to_json_string(use_diff=False))))
    assert router.num_experts == EXPERTS
    bias = getattr(theirs, "bias", None)
    assert router.has_bias == (bias is not None)
    logits = nn.functional.linear(x, theirs.weight, bias).detach()
    selection_bias = getattr(theirs, "e_score_correction_bias", None)
    assert router.has_selection_bias == (selection_bias is not None)
    found = route(logits, router, selection_bias)
    expected, own = torch.zeros(2, 300, EXPERTS).unbind()
    expected.scatter_(1, experts, weights)
    own.scatter_(1, found.experts, found.weights)
    assert torch.equal(expected != 0, own != 0)
    torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"n_group": 3}, "n_group 3 does not divide the 16 experts"),
        ({"topk_group": 5}, "topk_group 5 is more than n_group 4"),
        ({"n_group": 16, "topk_group": 16}, "n_group 16 leaves 1 experts in a group, which needs 2"),
        (
            {"topk_group": 1, "num_experts_per_tok": 5},
            "num_experts_per_tok 5 is more than the 4 experts of topk_group 1",
        ),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok 17 is more than the 16 experts"),
        ({"n_routed_experts": 0}, "n_routed_experts must be a positive integer, not 0"),
        ({"n_routed_experts": 10**8}, "n_routed_experts must be at most 10000"),
        ({"routed_scaling_factor": -1}, "routed_scaling_factor must be a positive number"),
    ],
)
def test_groups_that_do_not_fit_are_refused(wrong: dict[str, Any], says: str) -> None:
    raw = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, **wrong}
    with pytest.raises(ConfigError, match=says):
        read_biased_router(ConfigFile(Path("config.json"), raw), 256)
