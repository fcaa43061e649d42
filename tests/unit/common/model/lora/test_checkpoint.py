"""What is wrong with an adapter is said in one sentence when it is opened."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.lora_files import write_adapter
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.model.config import ModelConfig, load_model_config
from common.model.lora.checkpoint import open_adapter


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model: Path) -> ModelConfig:
    return load_model_config(model)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal LoRA"),
        ({"kasa_config": {"beta": 1e-4}}, "KaSA"),
        ({"monteclora_config": {"num_samples": 8}}, "Monte Carlo LoRA"),
        ({"arrow_config": {"top_k": 2}}, r"routing between adapters \(Arrow\)"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed base weights"),
        ({"init_lora_weights": "loftq"}, "changed base weights"),
        ({"init_lora_weights": "OLoRA"}, "changed base weights"),
        ({"peft_type": "LOHA"}, "no LoRA adapter"),
        ({"r": 5}, "has rank 4, and adapter_config.json says 5"),
        ({"lora_alpha": None}, "is no number"),
        ({"lora_alpha": 10**400}, "is no number"),
        ({"lora_alpha": -math.inf}, "is no number"),
        ({"alpha_pattern": {"up_proj": math.nan}}, "is no number"),
    ],
)
def test_what_the_config_asks_for_beyond_lora_is_refused(
    settings: dict[str, Any], reason: str, model: Path, config: ModelConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        open_adapter(write_adapter(tmp_path, model, **settings), config)


def test_a_config_that_is_nested_too_deeply_is_refused(model: Path, config: ModelConfig, tmp_path: Path) -> None:
    (write_adapter(tmp_path, model) / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read"):
        open_adapter(tmp_path, config)


def test_an_adapter_of_another_model_is_refused(config: ModelConfig, tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"for another base model \(big\)"):
        open_adapter(write_adapter(tmp_path / "a", other, base_model_name_or_path="big"), config)


def test_layers_of_another_tower_are_not_taken_for_those_of_the_text(
    model: Path, config: ModelConfig, tmp_path: Path
) -> None:
    file = write_adapter(tmp_path, model) / "adapter_model.safetensors"
    tensors = load_file(file)
    twice = {name.replace("model.model.", "model.vision_tower.", 1): 2 * tensor for name, tensor in tensors.items()}
    save_file({**tensors, **twice}, file)
    with pytest.raises(ConfigError, match="of layer 0 twice"):
        open_adapter(tmp_path, config)


def test_ranks_beyond_what_the_node_accepts_are_refused(model: Path, config: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank 32, and this node accepts at most 16"):
        open_adapter(write_adapter(tmp_path, model, rank=32), config, max_rank=16)
    with pytest.raises(ConfigError, match="has rank 0"):
        open_adapter(write_adapter(tmp_path, model, rank=0), config)


def test_tensors_of_no_linear_layer_and_halves_of_pairs_are_refused(
    model: Path, config: ModelConfig, tmp_path: Path
) -> None:
    file = write_adapter(tmp_path, model) / "adapter_model.safetensors"
    whole = load_file(file)
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    for name, reason in [
        ("base_model.model.lm_head.lora_A.weight", "lm_head, which is no linear layer"),
        ("base_model.model.model.layers.99.mlp.up_proj.lora_A.weight", "no linear layer"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "no A or B"),
    ]:
        save_file({**whole, name: torch.zeros(4, 4)}, file)
        with pytest.raises(ConfigError, match=reason):
            open_adapter(tmp_path, config)
    save_file({name: each for name, each in whole.items() if name != first + "B.weight"}, file)
    with pytest.raises(ConfigError, match="no matrices A and B"):
        open_adapter(tmp_path, config)
    file.write_bytes(b"\x00" * 40)
    with pytest.raises(ConfigError, match="cannot be read"):
        open_adapter(tmp_path, config)
    file.unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        open_adapter(tmp_path, config)


def test_scales_follow_alpha_rank_and_patterns(model: Path, config: ModelConfig, tmp_path: Path) -> None:
    settings = {"lora_alpha": 6, "alpha_pattern": {"up_proj": 2, r"layers.1.mlp.up_proj": 3}, "use_rslora": True}
    modules = open_adapter(write_adapter(tmp_path, model, **settings), config).modules
    assert modules[0, "self_attn.q_proj"].scale == 6 / math.sqrt(4)
    assert modules[0, "mlp.up_proj"].scale == 2 / math.sqrt(4)
    settings = {"lora_alpha": 6}
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, **settings}))
    assert open_adapter(tmp_path, config).modules[0, "mlp.up_proj"].scale == 6 / 4


@pytest.mark.parametrize(
    ("pattern", "scale"),
    [
        ("up_proj", 9.0),
        (r"layers\.(0|2)\..*up_proj", 9.0),
        (r".*\.up_proj$", 9.0),
        (r"^model.layers.0.mlp.up_proj", 9.0),
        (r"^layers.0.mlp.up_proj", 1.5),
        (r"layers\.\d+\.mlp\.[a-t]\w+", 1.5),
        (r"p_proj", 1.5),
        ("(x+x+)+y", 1.5),
        ("(.*)*" * 50 + "z", 1.5),
        (r"((\w{0,50}){0,50}){0,50}x", 1.5),
    ],
)
def test_patterns_match_the_ends_of_names(
    pattern: str, scale: float, model: Path, config: ModelConfig, tmp_path: Path
) -> None:
    settings = {"lora_alpha": 6, "alpha_pattern": {pattern: 36}}
    modules = open_adapter(write_adapter(tmp_path, model, **settings), config).modules
    assert modules[0, "mlp.up_proj"].scale == scale


@pytest.mark.timeout(20)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("patterns", "reason"),
    [
        (["(" * 200 + "a" + "+)" * 200 + "b"], "too complex|can be used"),
        ([r"(?=up)up_proj"], "look-around"),
        ([r"(.)\1"], "backreferences"),
        (["("], "unclosed group"),
        (["[a]" * 200], "613 characters"),
        ([f"layers.{number}.up" for number in range(5000)], "5000 patterns"),
    ],
)
def test_patterns_that_would_take_long_are_refused(
    key: str, patterns: list[str], reason: str, model: Path, config: ModelConfig, tmp_path: Path
) -> None:
    """Nested repeats took Python's engine longer than a cluster lives."""
    with pytest.raises(ConfigError, match=reason):
        open_adapter(write_adapter(tmp_path, model, **{key: dict.fromkeys(patterns, 1)}), config)


def test_a_digest_covers_weights_and_scales_and_nothing_else(model: Path, config: ModelConfig, tmp_path: Path) -> None:
    def digest(name: str, **settings: Any) -> str:
        checkpoint = open_adapter(write_adapter(tmp_path / name, model, **settings), config)
        return checkpoint.digest(checkpoint.read())

    assert digest("a") == digest("b", lora_dropout=0.1)
    assert len({digest("a"), digest("c", seed=1), digest("d", lora_alpha=9)}) == 3
