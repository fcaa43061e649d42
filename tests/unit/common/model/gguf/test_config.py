"""A GGUF file's metadata give the config that the Hugging Face folder has."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, RopeScalingType
from support.gguf_families import FAMILIES, make_family
from support.gguf_files import Kind, finish, write_gguf
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig
from common.model.config import ModelConfig, load_model_config
from common.model.description import MlpDescription, multi_head
from common.model.families.registry import FAMILIES as FAMILIES_BY_CLASS
from common.model.files import weight_files
from common.model.gguf.architectures import ARCHITECTURES, GGUF_EXPERT_NAMES
from common.model.hub import resolve_model
from common.model.rope import RopeConfig
from common.node.plan import plan_node
from router.models.served_model import LoadOptions, load
from router.text.tokenizer import Tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_the_config_is_that_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = make_family(name, tmp_path / "original")
    file, _ = write_gguf(folder, tmp_path, lambda name, weight: Kind.F32)
    found, expected = load_model_config(file), load_model_config(folder)
    assert rounded(found) == rounded(dataclasses.replace(expected, weight_names=found.weight_names))


@pytest.mark.parametrize("name", ["gpt-oss", "glm4-moe", "granite-moe", "qwen3-moe"])
def test_the_config_of_a_mixture_is_that_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = make_tiny(name, tmp_path / "original")
    file, _ = write_gguf(folder, tmp_path, lambda name, weight: Kind.F32)
    found, expected = load_model_config(file), load_model_config(folder)
    assert rounded(found).layers == tuple(
        layer
        if isinstance(layer.mlp, MlpDescription)
        else dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, expert_names=GGUF_EXPERT_NAMES))
        for layer in rounded(expected).layers
    )


def rounded(config: ModelConfig) -> ModelConfig:
    """Without what float32 loses of the parameters of longrope."""

    def short(rope: RopeConfig) -> RopeConfig:
        factors, factor = tuple(round(each, 5) for each in rope.factors), round(rope.attention_factor, 6)
        return dataclasses.replace(rope, factors=factors, attention_factor=factor)

    layers = [dataclasses.replace(layer, rope=layer.rope and short(layer.rope)) for layer in config.layers]
    return dataclasses.replace(config, layers=tuple(layers))


def test_every_native_family_that_llama_cpp_converts_can_be_read() -> None:
    read = {each.transformers_class for each in ARCHITECTURES.values()}
    # Mistral's files are Llama's; OPT has no architecture in llama.cpp; of models that take images the text part is a file.
    others = {"MistralForCausalLM", "OPTForCausalLM", "Gemma3ForConditionalGeneration"}
    read |= {each.class_with_experts for each in ARCHITECTURES.values()}
    # Mixtures of experts with latents are refused.
    others |= {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"}
    assert read | others >= FAMILIES_BY_CLASS.keys() - {"Qwen2_5_VLForConditionalGeneration"}


def test_the_text_part_of_qwen2_vl_is_a_qwen2(tmp_path: Path) -> None:
    folder = make_tiny("qwen2", tmp_path / "original")
    (tmp_path / "vl").mkdir()
    config = load_model_config(write_gguf(folder, tmp_path / "vl", lambda name, weight: Kind.F32, "qwen2vl")[0])
    assert config == dataclasses.replace(load_model_config(folder), weight_names=config.weight_names)


@pytest.mark.parametrize(
    ("architecture", "layers", "scale"), [("gemma2", 46, 144.0), ("gemma3", 62, 144.0), ("gemma2", 2, 128.0)]
)
def test_the_largest_gemma_has_another_scale_as_in_llama_cpp(
    tmp_path: Path, architecture: str, layers: int, scale: float
) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", architecture)
    for key, number in {
        "context_length": 8192,
        "embedding_length": 4608,
        "block_count": layers,
        "feed_forward_length": 64,
        "attention.head_count": 32,
        "attention.head_count_kv": 16,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.sliding_window": 4096,
    }.items():
        writer.add_uint32(f"{architecture}.{key}", number)
    writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float32))
    finish(writer)
    assert multi_head(load_model_config(tmp_path / "m.gguf").layers[0]).scale == pytest.approx(scale**-0.5)


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
    finish(writer)
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
        ("qwen2.expert_shared_feed_forward_length", 64, "shared experts of this architecture are not supported"),
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
    assert (plan.path, plan.model.name, plan.dtype) == (file, "model", "bfloat16")
    assert weight_files(plan.path) == [file]
    served = load(plan.model.path, None, LoadOptions())
    assert served.name == "model"
    assert served.tokenizer_digest == plan.model.tokenizer != ""
    assert served.tokenizer.encode("w5 w7") == Tokenizer(tmp_path).encode("w5 w7")
    assert plan_node(DecodeConfig(model=str(file), quantization="int8")).layout.kv_kind != plan.layout.kv_kind


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ConfigError, match="is neither a directory nor a GGUF file"):
        resolve_model(str(tmp_path / "model.bin"))
