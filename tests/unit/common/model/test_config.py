"""What is read from config.json, and what a user is told about a directory that cannot be served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.oracle import TINY, architecture
from transformers import AutoConfig

from common.base.errors import ConfigError
from common.model.config import load_model_config
from common.model.description import multi_head
from common.model.rope import RopeConfig

# As Qwen2.5-0.5B-Instruct has it: the keys of transformers 4.
QWEN25: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 151645,
    "bos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
OPT: dict[str, Any] = {"architectures": ["OPTForCausalLM"], "hidden_act": None, "activation_function": "relu"}
GPT2: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12}
SMOLLM3: dict[str, Any] = {"architectures": ["SmolLM3ForCausalLM"]}
GEMMA3: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"]}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_reads_a_transformers_4_config(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, QWEN25, {"eos_token_id": [151645, 151643]}))
    layer = config.layers[0]
    attention = multi_head(layer)
    assert (attention.head_dim, attention.num_kv_heads, config.vocab_size) == (64, 2, 151936)
    assert (attention.qkv_bias, attention.output_bias, layer.mlp.bias) == (True, False, False)
    assert attention.head_norm is None
    assert config.layers == (layer,) * 24
    assert layer.rope == RopeConfig(theta=1e6)
    assert config.eos_token_ids == (151645, 151643)
    assert config.bos_token_id == 151643
    assert config.resolve_dtype("auto") == "bfloat16"
    assert config.fit_context(None) == 32768


@pytest.mark.parametrize("name", TINY)
def test_reads_what_transformers_5_writes(tmp_path: Path, name: str) -> None:
    whole = TINY[name].config
    whole.architectures = [architecture(whole)]
    whole.save_pretrained(tmp_path)
    theirs = whole.get_text_config()
    ours = load_model_config(tmp_path)
    rope = ours.layers[0].rope
    if rope is not None and "rope_theta" in theirs.rope_parameters:
        assert rope.theta == theirs.rope_parameters["rope_theta"]
        assert rope.kind == theirs.rope_parameters["rope_type"]
    types = getattr(theirs, "layer_types", None)
    if types is not None:
        sliding = [theirs.sliding_window if kind == "sliding_attention" else None for kind in types]
        assert [layer.attention.window for layer in ours.layers] == sliding
    assert ours.tie_word_embeddings == whole.tie_word_embeddings
    assert ours.eos_token_ids == (2,)
    dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.layers[0].attention.rotary_dim == dim


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, [None] * 24),
        ({"use_sliding_window": True}, [None] * 21 + [32768] * 3),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 512}, [512] * 24),
        (
            {"use_sliding_window": True, "layer_types": [*["sliding_attention"] * 2, *["full_attention"] * 22]},
            [32768] * 2 + [None] * 22,
        ),
        ({"use_sliding_window": True, "sliding_window": None}, [None] * 24),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, [4096] * 24),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, [None] * 24),
        (
            {
                "architectures": ["MistralForCausalLM"],  # Ministral-8B
                "sliding_window": 4096,
                "layer_types": ["full_attention", *["sliding_attention"] * 3] * 6,
            },
            [None, 4096, 4096, 4096] * 6,
        ),
    ],
)
def test_layers_have_the_sliding_windows_of_their_architecture(
    tmp_path: Path, change: dict[str, Any], windows: list[int | None]
) -> None:
    config = load_model_config(write(tmp_path, {**QWEN25, **change}))
    assert [layer.attention.window for layer in config.layers] == windows
    assert config.fit_context(None) == 32768


def test_a_context_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings of 32768"):
        load_model_config(write(tmp_path, QWEN25)).fit_context(40000)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM.*supported: LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None}, "is not given"),
        ({"architectures": [["LlamaForCausalLM"], {}]}, "is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 2**40}, "hidden_size must be at most"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000"),
        ({"hidden_size": "896"}, "hidden_size must be a positive integer"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, "rope scaling 'ntk' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling is not an object"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "long_factor of the rope parameters"),
        ({"hidden_act": "swiglu"}, "hidden_act 'swiglu'"),
        ({**OPT, "word_embed_proj_dim": 512}, "projected embeddings are not supported"),
        ({**OPT, "do_layer_norm_before": False}, "do_layer_norm_before"),
        ({**OPT, "_remove_final_layer_norm": True}, "without final norm"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is not supported"),
        ({**GPT2, "quantization_config": FP8}, "quantized weights of GPT2LMHeadModel"),
        ({**GEMMA3, "layer_types": ["full_attention"]}, "not a list of 24 times full_attention or sliding_attention"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({**SMOLLM3, "no_rope_layers": [1, 0]}, "not a list of 24 numbers"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}}},
            "stored rotated",
        ),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"tie_word_embeddings": 1}, "true or false"),
    ],
)
def test_what_cannot_be_served_is_named_in_one_sentence(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_model_config(write(tmp_path, {**QWEN25, **change}))
    assert "\n" not in caught.value.message
    assert "config.json" in caught.value.message


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_missing_or_corrupt_config_is_a_config_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        load_model_config(tmp_path)
    assert "\n" not in caught.value.message


def test_config_needs_no_torch() -> None:
    program = "import sys; import common.model.config, common.model.fingerprint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_gemma_3_of_transformers_4_has_a_base_of_rope_for_layers_with_a_window(tmp_path: Path) -> None:
    # As gemma-3-4b has it.
    raw = {**QWEN25, **GEMMA3, "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 1024}
    raw |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = load_model_config(write(tmp_path, raw))
    local, scaled = RopeConfig(1e4), RopeConfig(1e6, "linear", 8.0)
    assert [layer.rope for layer in config.layers] == [*[local] * 5, scaled] * 4
    assert [layer.attention.window for layer in config.layers] == [*[1024] * 5, None] * 4
    assert config.fit_context(None) == 32768


def test_rope_scaling_of_gemma_3_is_of_layers_without_a_window(tmp_path: Path) -> None:
    """As in transformers; users add it to a config that has both."""
    raw = TINY["gemma3"].config.to_dict() | {"architectures": ["Gemma3ForCausalLM"]}
    raw["rope_parameters"]["full_attention"]["rope_theta"] = 5e5
    config = load_model_config(write(tmp_path, raw | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}))
    local, scaled = RopeConfig(1e4), RopeConfig(5e5, "linear", 8.0)
    assert [layer.rope for layer in config.layers] == [local, scaled, local]
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert theirs["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert theirs["full_attention"] == {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0}


@pytest.mark.parametrize("name", ["gemma3-vision", "qwen2.5-vl"])
def test_beside_its_text_part_a_config_describes_no_text_model(tmp_path: Path, name: str) -> None:
    """As in transformers; configs that older versions saved have many keys twice."""
    raw = TINY[name].config.to_dict() | {"architectures": [architecture(TINY[name].config)]}
    expected = load_model_config(write(tmp_path, raw))
    beside = {"rms_norm_eps": 0.5, "query_pre_attn_scalar": 99, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert load_model_config(write(tmp_path, raw | beside)) == expected
    theirs = AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert theirs.rms_norm_eps == raw["text_config"]["rms_norm_eps"]
