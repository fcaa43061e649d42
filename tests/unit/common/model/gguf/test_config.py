"""A GGUF file's metadata give the config that the Hugging Face folder has."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, RopeScalingType
from support.gguf_files import Kind, write_gguf
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig
from common.model.config import ModelConfig, load_model_config
from common.model.files import weight_files
from common.model.gguf.config import GGUF_NAMES
from common.model.hub import resolve_model
from common.node.plan import plan_node
from router.models.served_model import LoadOptions, load
from router.text.tokenizer import Tokenizer


@pytest.mark.parametrize("name", ["llama", "llama-biases", "llama-linear", "qwen2", "qwen3"])
def test_the_config_is_that_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = make_tiny(name, tmp_path / "original")
    file, _ = write_gguf(folder, tmp_path, lambda name, weight: Kind.F32)
    assert load_model_config(file) == dataclasses.replace(load_model_config(folder), weight_names=GGUF_NAMES)


def scaled(file: Path, **more: float) -> ModelConfig:
    """A file without layers' weights whose context YaRN has made four times as long."""
    return written(file, more, yarn=True)


def written(file: Path, floats: dict[str, float], numbers: dict[str, int] | None = None, *, yarn: bool) -> ModelConfig:
    """`floats`: of the rope's scaling; `numbers`: any others."""
    writer = GGUFWriter(file, "qwen2")
    writer.add_context_length(131072)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    if yarn:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32768)
    for key, value in floats.items():
        writer.add_float32(f"qwen2.rope.{key}" if key == "scale_linear" else f"qwen2.rope.scaling.{key}", value)
    for key, number in (numbers or {}).items():
        writer.add_uint32(key, number)
    writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return load_model_config(file)


def test_yarn_is_that_of_the_original_context(tmp_path: Path) -> None:
    config = scaled(tmp_path / "a.gguf")
    rope = config.layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.factor, rope.original_max_position, config.max_context) == ("yarn", 4.0, 32768, 131072)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    other = scaled(tmp_path / "b.gguf", yarn_beta_fast=16.0, yarn_beta_slow=2.0, attn_factor=0.5).layers[0].rope
    assert other is not None
    assert (other.high_freq_factor, other.low_freq_factor) == (16.0, 2.0)
    assert other.attention_factor == pytest.approx(0.5 * rope.attention_factor)
    with pytest.raises(ConfigError, match=r"rope\.scaling\.yarn_log_multiplier is not supported"):
        scaled(tmp_path / "c.gguf", yarn_log_multiplier=0.1)


def test_scaling_without_a_type_is_linear_as_in_llama_cpp(tmp_path: Path) -> None:
    """Files of 2023 have one number; their answers were noise."""
    for key in ("factor", "scale_linear"):
        rope = written(tmp_path / f"{key}.gguf", {key: 8.0}, yarn=False).layers[0].rope
        assert rope is not None
        assert (rope.kind, rope.factor) == ("linear", 8.0)
    rope = written(tmp_path / "one.gguf", {"scale_linear": 1.0}, yarn=False).layers[0].rope
    assert rope is not None
    assert rope.kind == "default"


def test_answers_end_at_the_tokens_that_end_them_in_llama_cpp(tmp_path: Path) -> None:
    ends = {"eos": 3, "eot": 4, "eom": 5}
    numbers = {f"tokenizer.ggml.{name}_token_id": number for name, number in ends.items()}
    assert written(tmp_path / "a.gguf", {}, numbers, yarn=False).eos_token_ids == (3, 4, 5)


@pytest.mark.parametrize(
    ("key", "number", "message"),
    [
        ("qwen2.rope.dimension_count", 16, r"rope\.dimension_count 16 differs from a head's 32"),
        ("qwen2.attention.value_length", 64, r"attention\.value_length 64 differs from a head's 32"),
        ("split.count", 3, "is one part of a model"),
    ],
)
def test_what_native_families_lack_is_refused(tmp_path: Path, key: str, number: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        written(tmp_path / "a.gguf", {}, {key: number}, yarn=False)


def test_nodes_and_routers_take_a_file_as_the_model(tmp_path: Path) -> None:
    file, _ = write_gguf(make_tiny("llama3", tmp_path / "original"), tmp_path, lambda name, weight: Kind.Q8_0)
    plan = plan_node(DecodeConfig(model=str(file)))
    assert (plan.path, plan.model.name, plan.weights.dtype) == (file, "model", "bfloat16")
    assert weight_files(plan.path) == [file]
    served = load(plan.model.path, None, LoadOptions())
    assert served.name == "model"
    assert served.tokenizer_digest == plan.model.tokenizer != ""
    assert served.tokenizer.encode("w5 w7") == Tokenizer(tmp_path).encode("w5 w7")
    assert plan_node(DecodeConfig(model=str(file), quantization="int8")).layout.kv_kind != plan.layout.kv_kind


def test_a_file_without_a_tokenizer_beside_it_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file, _ = write_gguf(make_tiny("llama3", tmp_path / "original"), tmp_path, lambda name, weight: Kind.Q8_0)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in"):
        load(str(file), None, LoadOptions())


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ConfigError, match="is neither a directory nor a GGUF file"):
        resolve_model(str(tmp_path / "model.bin"))
