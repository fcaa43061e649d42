"""What is said of a model whose class in transformers cannot run on a paged KV cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.generic_models import config_of
from transformers import AutoConfig

from common.base.errors import ConfigError
from common.model.config import load_model_config
from common.model.fingerprint import fingerprint
from common.model.generic.describe import describe


def folder_of(folder: Path, kind: str, architecture: str, **more: Any) -> Path:
    config = AutoConfig.for_model(kind, **more)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "architecture", "more", "reason"),
    [
        ("bloom", "BloomForCausalLM", {}, "does not use its attention interface"),
        ("t5", "T5ForConditionalGeneration", {}, "is no decoder-only architecture"),
        ("lfm2", "Lfm2ForCausalLM", {}, "does more than attention over a KV cache"),
        ("bert", "BertLMHeadModel", {}, "is not causal"),
        ("llama4_text", "Llama4ForCausalLM", {"num_hidden_layers": 2}, "layers of kind chunked_attention"),
        ("diffllama", "DiffLlamaForCausalLM", {"num_hidden_layers": 2}, "calls attention 4 times in 2 layers"),
        ("mamba", "MambaForCausalLM", {}, "does not use its attention interface"),
    ],
)
def test_a_class_that_needs_more_is_refused_with_the_reason(
    tmp_path: Path, kind: str, architecture: str, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        describe(folder_of(tmp_path, kind, architecture, **more))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1 to 10000, not 0"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be a whole number from 1 to 10000"),
        ({"hidden_size": 0}, r"a tensor of shape \[250, 0\], without numbers"),
        ({"intermediate_size": 0}, r"mlp\.gate_proj\.weight of LlamaForCausalLM a tensor of shape \[0, 64\]"),
        ({"num_key_value_heads": 3}, "4 query heads, no multiple of its 3 KV heads"),
        ({"hidden_size": "many"}, "cannot read it: .*'hidden_size': .*expected int"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_a_config_that_no_model_has_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    config = config_of("llama", architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ConfigError, match=reason):
        describe(tmp_path)


def test_code_that_comes_with_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MyModel"], "auto_map": {"AutoConfig": "mine.MyConfig"}}')
    (tmp_path / "mine.py").write_text("raise SystemExit(1)")
    with pytest.raises(ConfigError, match="code of its own, which is never run"):
        describe(tmp_path)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    config = config_of("glm")
    config.architectures = ["GlmForCausalLM"]
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="quantized checkpoints need a native family"):
        describe(tmp_path)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 96),
        ({"rope_type": "linear", "factor": 2.5}, 240),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 1.25, "original_max_position_embeddings": 64}, 96),
        ({"rope_type": "yarn", "factor": 4.0}, 384),
        ({"rope_type": "dynamic", "factor": 4.0}, 96),
        (
            {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 32},
            96,
        ),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else str(value),
)
def test_contexts_reach_as_far_as_in_the_native_family(tmp_path: Path, rope: dict[str, Any], longest: int) -> None:
    text = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 96}
    more: dict[str, Any] = {**text, "vocab_size": 200, "rope_parameters": {"rope_theta": 10000.0, **rope}}
    folder = folder_of(tmp_path, "llama", "LlamaForCausalLM", **more)
    assert describe(folder).max_context == load_model_config(folder).max_context == longest


def test_layers_are_described_as_the_class_calls_attention(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "cohere2", "Cohere2ForCausalLM", num_hidden_layers=4, sliding_window=32)
    config = describe(folder)
    assert [layer.attention.window for layer in config.layers] == [32, 32, 32, None]
    assert config.attention.num_q_heads == 64
    assert config.attention.scale == pytest.approx(config.attention.head_dim**-0.5)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_type_of_the_weights_is_that_of_the_file(tmp_path: Path, key: str) -> None:
    """Models were served in float32, which takes twice the memory, unless --dtype said otherwise."""
    folder = folder_of(tmp_path, "mixtral", "MixtralForCausalLM")
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps({**raw, key: "bfloat16"}))
    assert describe(folder).resolve_dtype("auto") == "bfloat16"


@pytest.mark.parametrize(("rope", "differs"), [("default", False), ("dynamic", True)])
def test_nodes_with_other_longest_contexts_agree_unless_the_rope_depends_on_it(
    tmp_path: Path, rope: str, differs: bool
) -> None:
    config = config_of("mixtral", head_dim=16, rope_parameters={"rope_type": rope, "rope_theta": 1e4, "factor": 2.0})
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(tmp_path)
    described = describe(tmp_path)
    found = {fingerprint(tmp_path, described.for_context(length), "dummy", "float32", 0) for length in (64, 128)}
    assert len(found) == 1 + differs


def test_the_text_part_of_a_config_says_how_many_layers_and_positions_there_are(tmp_path: Path) -> None:
    """A node of Fuyu ended with a traceback."""
    text = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 96}
    described = describe(
        folder_of(tmp_path, "fuyu", "FuyuForCausalLM", text_config={**text, "model_type": "persimmon"})
    )
    assert (described.num_layers, described.max_context) == (2, 96)
