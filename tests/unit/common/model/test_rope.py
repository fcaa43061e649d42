"""What config.json says about rotary embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import TINY, architecture
from transformers import AutoConfig, AutoModel, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

from common.base.device import CPU
from common.base.errors import ConfigError
from common.kernels.torch_kernels import TORCH
from common.model.config import load_model_config
from common.model.rope import RopeConfig
from common.model.rotary import inverse_frequencies, make_rotary

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1792,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rope_theta": 500000.0,
    "vocab_size": 1000,
}
LLAMA3_OLD_KEYS = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_llama3_rope_scaling_equals_transformers_for_old_and_new_keys(tmp_path: Path) -> None:
    old = load_model_config(write(tmp_path, {**LLAMA, "rope_scaling": LLAMA3_OLD_KEYS}))
    new = load_model_config(write(tmp_path, {**LLAMA, "rope_parameters": {**LLAMA3_OLD_KEYS, "rope_theta": 500000.0}}))
    assert old == new
    theirs = TINY["llama3"].config.__class__(
        hidden_size=1792, num_attention_heads=14, rope_parameters={**LLAMA3_OLD_KEYS, "rope_theta": 500000.0}
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    torch.testing.assert_close(
        inverse_frequencies(old.layers[0].rope, old.layers[0].attention.rotary_dim), expected, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
        {"rope_type": "yarn", "factor": 40.0, "beta_fast": 24, "mscale": 0.9, "mscale_all_dim": 0.6, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "original_max_position_embeddings": 1024},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.25},
        {
            "rope_type": "longrope",
            "short_factor": [1.0 + i for i in range(64)],
            "long_factor": [2.0 + i for i in range(64)],
            "original_max_position_embeddings": 1024,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_frequencies_and_the_attention_factor_equal_those_of_transformers(
    tmp_path: Path, scaling: dict[str, Any]
) -> None:
    rope = {**scaling, "rope_theta": 500000.0}
    ours = load_model_config(write(tmp_path, {**LLAMA, "max_position_embeddings": 8192, "rope_parameters": rope}))
    theirs = TINY["llama3"].config.__class__(
        hidden_size=1792, num_attention_heads=14, max_position_embeddings=8192, rope_parameters=rope
    )
    make = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    for reach in (8192, 1024):
        found = ours.for_context(reach).layers[0].rope
        assert found is not None
        expected, factor = make(theirs, torch.device("cpu"), seq_len=reach)
        torch.testing.assert_close(
            inverse_frequencies(found, ours.layers[0].attention.rotary_dim), expected, rtol=1e-5, atol=0
        )
        assert found.attention_factor == pytest.approx(factor)


def test_yarn_reaches_beyond_the_original_context(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = load_model_config(write(tmp_path, {**LLAMA, "max_position_embeddings": 32768, "rope_scaling": scaling}))
    assert config.max_context == 131072


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_an_original_context_beside_the_rope_parameters_goes_first(tmp_path: Path, kind: str) -> None:
    """As in transformers and vLLM."""
    own = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    scaling = {"rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 4096, **own}
    raw = {**LLAMA, "model_type": "llama", "original_max_position_embeddings": 512, "rope_scaling": scaling}
    config = load_model_config(write(tmp_path, raw))
    rope = config.layers[0].rope
    assert rope is not None
    expected = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq
    torch.testing.assert_close(inverse_frequencies(rope, config.layers[0].attention.rotary_dim), expected)


def test_phi_3_was_trained_on_4096_tokens_where_nothing_beside_the_rope_parameters_says_otherwise(
    tmp_path: Path,
) -> None:
    """As in transformers, also where the parameters themselves say otherwise."""
    factors = {"short_factor": [1.0 + i for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
    rope = {"type": "longrope", **factors, "original_max_position_embeddings": 512}
    raw = TINY["phi3"].config.to_dict() | {"architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 131072}
    raw |= {"rope_parameters": None, "rope_scaling": rope, "rope_theta": 10000.0}
    del raw["original_max_position_embeddings"]
    found = load_model_config(write(tmp_path, raw)).layers[0].rope
    assert found is not None
    theirs = Phi3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    assert found.original_max_position == 4096
    assert found.attention_factor == pytest.approx(theirs.attention_scaling)


def test_linear_scaling_reaches_as_far_as_its_factor(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 4.0}
    config = load_model_config(write(tmp_path, {**LLAMA, "max_position_embeddings": 4096, "rope_scaling": scaling}))
    assert config.max_context == 16384


def test_rope_scaling_that_was_added_to_what_transformers_5_wrote_counts(tmp_path: Path) -> None:
    """As in transformers, and as the documents of some models tell users to do."""
    both = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    }
    rope = load_model_config(write(tmp_path, {**LLAMA, "max_position_embeddings": 131072, **both})).layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.factor, rope.theta) == ("yarn", 4.0, 1e6)


@pytest.mark.parametrize("part", [0.25, 0.4, 0.99])
def test_an_odd_part_of_a_head_is_rounded_up_as_in_transformers(part: float) -> None:
    """A quarter of 30 features are 7, of which steps could not be computed."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part}
    theirs = Phi3Config(hidden_size=60, num_attention_heads=2, num_key_value_heads=1, rope_parameters=rope)
    positions, qk = torch.arange(5), torch.randn(5, 3, 30, generator=torch.Generator().manual_seed(0))
    cos, sin = Phi3RotaryEmbedding(theirs)(qk, positions[None])
    expected, _ = apply_rotary_pos_emb(qk[None], qk[None], cos, sin, unsqueeze_dim=2)
    make_rotary(RopeConfig(rotated_part=part), 30, 16, TORCH, CPU).step(positions, torch.float32).rotate_(qk, 2)
    torch.testing.assert_close(qk, expected[0], rtol=1e-6, atol=1e-6)


def test_more_than_a_whole_head_cannot_be_rotated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="partial_rotary_factor is 1"):
        load_model_config(write(tmp_path, {**LLAMA, "partial_rotary_factor": 1.5}))


@pytest.mark.parametrize(
    "name",
    ["llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "olmo2", "starcoder2", "gemma2", "phi3"],
)
@pytest.mark.parametrize("beside", [True, False])
def test_a_part_of_heads_counts_without_scaling_where_it_does_in_transformers(
    tmp_path: Path, name: str, beside: bool
) -> None:
    raw = TINY[name].config.to_dict()
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    part = {"partial_rotary_factor": 0.5}
    raw |= {"architectures": [architecture(TINY[name].config)], "rope_parameters": rope if beside else rope | part}
    write(tmp_path, raw | part if beside else raw)
    config = load_model_config(tmp_path)
    rope_of_all = config.layers[0].rope
    assert rope_of_all is not None
    with torch.device("meta"):
        theirs = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path))
    expected = theirs.rotary_emb.compute_default_rope_parameters(theirs.config)[0]
    torch.testing.assert_close(inverse_frequencies(rope_of_all, config.layers[0].attention.rotary_dim), expected)


@pytest.mark.parametrize(
    ("rope", "why"),
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 1}, "must be from 2 to 2147483647, not 1"),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10**20},
            "must be from 2 to 2147483647",
        ),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "rope_theta must be above 1 with yarn, not 1.0"),
        ({"rope_type": "factors"}, "factors of the rope parameters is not a list"),
    ],
)
def test_parameters_that_no_model_has_are_named(tmp_path: Path, rope: dict[str, Any], why: str) -> None:
    config = {**LLAMA, "max_position_embeddings": 8192, "rope_parameters": rope}
    with pytest.raises(ConfigError, match=why):
        load_model_config(write(tmp_path, config))
