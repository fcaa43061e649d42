"""GGUF files made from models in Hugging Face format as llama.cpp's converter makes them, each with an equal folder."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import dequantize, quantize
from gguf.tensor_mapping import TensorNameMap, get_tensor_name_map
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.model.config import ModelConfig, load_model_config
from common.model.description import MixtureDescription, MlpDescription, multi_head
from common.model.rope import RopeConfig
from common.model.rotary import inverse_frequencies

Kind = GGMLQuantizationType

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
    "Starcoder2ForCausalLM": "starcoder2",
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "MixtralForCausalLM": "llama",
    "GptOssForCausalLM": "gpt-oss",
    "Glm4MoeForCausalLM": "glm4moe",
    "GraniteMoeForCausalLM": "granitemoe",
}
_PAIRED = ("llama", "granite", "granitemoe", "smollm3")
"""Architectures whose rows of q and k llama.cpp reorders."""
_K_QUANTS = {Kind.Q4_K: 144, Kind.Q5_K: 176, Kind.Q6_K: 210}
"""Formats that the gguf package reads but does not write: bytes of a block."""


_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
_View = Callable[[Tensor], Tensor]
_STACKED: dict[str, dict[str, _View]] = {
    "mlp.experts.gate_up_proj": {
        "ffn_gate_exps.weight": lambda weight: weight.transpose(1, 2)[:, ::2],
        "ffn_up_exps.weight": lambda weight: weight.transpose(1, 2)[:, 1::2],
    },
    "mlp.experts.gate_up_proj_bias": {
        "ffn_gate_exps.bias": lambda bias: bias[:, ::2],
        "ffn_up_exps.bias": lambda bias: bias[:, 1::2],
    },
    "mlp.experts.down_proj": {"ffn_down_exps.weight": lambda weight: weight.transpose(1, 2)},
    "mlp.experts.down_proj_bias": {"ffn_down_exps.bias": lambda bias: bias},
    "block_sparse_moe.input_linear.weight": {
        "ffn_gate_exps.weight": lambda weight: weight.chunk(2, 1)[0],
        "ffn_up_exps.weight": lambda weight: weight.chunk(2, 1)[1],
    },
    "block_sparse_moe.output_linear.weight": {"ffn_down_exps.weight": lambda weight: weight},
}
"""Tensors of all experts of gpt-oss and Granite: the tensors of a GGUF file that they become, as views of them."""


@cache
def names_of(architecture: str, num_layers: int) -> TensorNameMap:
    """llama.cpp's names of the tensors of a model."""
    known = {name: key for key, name in MODEL_ARCH_NAMES.items()}
    return get_tensor_name_map(known[architecture], num_layers)


def gguf_name(name: str, names: TensorNameMap | None = None) -> str:
    """A tensor's name in a GGUF file, by default of a Llama."""
    suffixes = (".weight", ".bias")
    # Maps of mixtures leave out dense layers.
    # As llama.cpp's converter renames them first.
    name = name.replace("self_attn.sinks", "self_attn.sinks.weight").replace("correction_bias", "correction.bias")
    found = (names and names.get_name(name, suffixes)) or names_of("llama", 100).get_name(name, suffixes)
    assert found is not None, name
    return found


def _in_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Reorder rows of q and k as llama.cpp expects them for Llama models."""
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def out_of_pairs(tensor: Tensor, heads: int) -> Tensor:
    """`_in_pairs`, undone."""
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _random_blocks(kind: Kind, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random K-quant blocks with small factors."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // 256, _K_QUANTS[kind]), dtype=np.uint8)
    factors = (rng.random((rows, columns // 256, 2)) * 2e-4).astype("<f2").view(np.uint8)
    if kind == Kind.Q6_K:
        blocks[..., -2:] = factors[..., :2]
    else:
        blocks[..., :4] = factors
        blocks[..., 4] = 0  # the first group's scale: a group of equal weights
    return blocks.reshape(rows, -1)


def _add_mlps(writer: GGUFWriter, config: ModelConfig) -> None:
    mlps = [layer.mlp for layer in config.layers]
    mixture = next((each for each in mlps if isinstance(each, MixtureDescription)), None)
    dense = next((each for each in mlps if isinstance(each, MlpDescription)), mixture)
    assert dense is not None
    writer.add_feed_forward_length(dense.inner_size)
    if mixture is not None:
        writer.add_expert_count(mixture.router.num_experts)
        writer.add_expert_used_count(mixture.router.top_k)
        writer.add_expert_feed_forward_length(mixture.inner_size)


def write_gguf(
    folder: Path,
    target: Path,
    kind_of: Callable[[str, Tensor], Kind],
    architecture: str | None = None,
    add_tokenizer: Callable[[GGUFWriter], None] | None = None,
) -> tuple[Path, Path]:
    """Write `target`/model.gguf and, in `target`/plain, the Hugging Face folder with the weights that it means.

    `kind_of`: how a matrix is stored, of its Hugging Face name and weights; vectors are F32. `architecture`: by default that of
    the class. `add_tokenizer` writes one into the file; without it, the tokenizer is copied beside the file.
    """
    plain, file = target / "plain", target / "model.gguf"
    shutil.copytree(folder, plain)
    config, raw = load_model_config(folder), json.loads((folder / "config.json").read_text())
    architecture = architecture or _ARCHITECTURES[config.architecture]
    writer = GGUFWriter(file, architecture)
    _write_shape(writer, folder)
    if add_tokenizer is not None:
        add_tokenizer(writer)
    else:
        shutil.copy(folder / "tokenizer.json", target)
        shutil.copy(folder / "tokenizer_config.json", target)
        writer.add_token_list([f"w{i}" for i in range(config.vocab_size)])
    _write_rope(writer, folder, raw)
    _OF_FAMILY.get(architecture, lambda writer, raw: None)(writer, raw)
    attention, names = multi_head(config.layers[0]), names_of(architecture, config.num_layers)
    heads = {"q_proj": attention.num_q_heads, "k_proj": attention.num_kv_heads} if architecture in _PAIRED else {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    kinds: dict[str, Kind] = {}
    for shard in folder.glob("*.safetensors"):
        means = {}
        for number, (name, tensor) in enumerate(load_file(shard).items()):
            if name.split(".", 3)[-1] in _STACKED:
                means[name] = _write_stacked(writer, name, tensor, kind_of)
                continue
            paired = heads.get(name.split(".")[-2])
            weight = tensor.float() if paired is None else _in_pairs(tensor.float(), paired)
            is_transposed = architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            weight = weight.t().contiguous() if is_transposed else weight
            offset = 1.0 if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight") else 0.0
            kind = kind_of(name, tensor) if tensor.dim() == 2 else Kind.F32
            if kind in _K_QUANTS:
                stored = _random_blocks(kind, weight.size(0), weight.size(1), number)
            else:
                stored = quantize((weight + offset).numpy(), kind)
            if match := _EXPERT.fullmatch(name):
                stacked = f"blk.{match[1]}.{_EXPERTS[match[3]]}.weight"
                experts.setdefault(stacked, {})[int(match[2])] = stored
                kinds[stacked] = kind
            else:
                writer.add_tensor(gguf_name(name, names), stored, raw_dtype=kind)
            found = torch.from_numpy(np.array(dequantize(stored, kind))).view(weight.shape) - offset
            found = found.t() if is_transposed else found
            means[name] = (found if paired is None else out_of_pairs(found, paired)).contiguous()
        save_file(means, plain / shard.name, {"format": "pt"})
    for name, each in experts.items():
        writer.add_tensor(name, np.stack([each[i] for i in range(len(each))]), raw_dtype=kinds[name])
    finish(writer)
    return file, plain


def finish(writer: GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_stacked(writer: GGUFWriter, name: str, tensor: Tensor, kind_of: Callable[[str, Tensor], Kind]) -> Tensor:
    """Write a tensor of all experts. Returns what it means."""
    means = tensor.float().clone()
    _, _, number, rest = name.split(".", 3)
    for stored_name, view in _STACKED[rest].items():
        part = view(means)
        kind = kind_of(name, part[0]) if part.dim() == 3 else Kind.F32
        stored = quantize(part.contiguous().numpy(), kind)
        writer.add_tensor(f"blk.{number}.{stored_name}", stored, raw_dtype=kind)
        part.copy_(torch.from_numpy(np.array(dequantize(stored, kind))).view(part.shape))
    return means


def _write_shape(writer: GGUFWriter, folder: Path) -> None:
    """What all families have."""
    config = load_model_config(folder)
    rope, attention = config.layers[0].rope, multi_head(config.layers[0])
    writer.add_embedding_length(config.hidden_size)
    if config.architecture != "Glm4MoeForCausalLM":  # its blocks are more
        writer.add_block_count(config.num_layers)
    _add_mlps(writer, config)
    writer.add_head_count(attention.num_q_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    norm = config.final_norm
    (writer.add_layer_norm_rms_eps if norm.kind == "rms" else writer.add_layer_norm_eps)(norm.eps)
    is_linear = rope is not None and rope.kind == "linear"
    writer.add_context_length(int(config.max_position_embeddings / (rope.factor if rope and is_linear else 1)))
    writer.add_eos_token_id(config.eos_token_ids[0])
    assert config.bos_token_id is not None
    writer.add_bos_token_id(config.bos_token_id)


def _write_rope(writer: GGUFWriter, folder: Path, raw: dict[str, Any]) -> None:
    config = load_model_config(folder)
    layer = config.layers[-1]
    if layer.rope is None:
        return
    head_dim = multi_head(layer).head_dim
    writer.add_rope_freq_base(layer.rope.theta)
    writer.add_rope_dimension_count(layer.rope.rotated_dim(head_dim))
    if layer.rope.kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(layer.rope.factor)
    if layer.rope.kind == "yarn":
        given = raw["rope_parameters"]
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(given["factor"])
        writer.add_rope_scaling_orig_ctx_len(given["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(given["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(given["beta_slow"])
    if layer.rope.kind == "llama3":
        factors = inverse_frequencies(RopeConfig(layer.rope.theta), head_dim) / inverse_frequencies(
            layer.rope, head_dim
        )
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    if layer.rope.kind == "longrope":
        given, original = raw["rope_parameters"], layer.rope.original_max_position
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        writer.add_tensor("rope_factors_long.weight", np.array(given["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(given["short_factor"], np.float32))


def _write_granite(writer: GGUFWriter, raw: dict[str, Any]) -> None:
    writer.add_attention_scale(raw["attention_multiplier"])
    writer.add_embedding_scale(raw["embedding_multiplier"])
    writer.add_residual_scale(raw["residual_multiplier"])
    writer.add_logit_scale(raw["logits_scaling"])


def _write_gemma2(writer: GGUFWriter, raw: dict[str, Any]) -> None:
    writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
    _write_gemma3(writer, raw)


def _write_gemma3(writer: GGUFWriter, raw: dict[str, Any]) -> None:
    if raw.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    writer.add_sliding_window(raw["sliding_window"])


def _write_glm4_moe(writer: GGUFWriter, raw: dict[str, Any]) -> None:
    writer.add_block_count(raw["num_hidden_layers"] + raw["num_nextn_predict_layers"])
    writer.add_nextn_predict_layers(raw["num_nextn_predict_layers"])
    writer.add_leading_dense_block_count(raw["first_k_dense_replace"])
    writer.add_expert_shared_count(raw["n_shared_experts"])
    writer.add_expert_group_count(raw["n_group"])
    writer.add_expert_group_used_count(raw["topk_group"])
    writer.add_expert_weights_norm(raw["norm_topk_prob"])
    writer.add_expert_weights_scale(raw["routed_scaling_factor"])
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


_OF_FAMILY: dict[str, Callable[[GGUFWriter, dict[str, Any]], None]] = {
    "granite": _write_granite,
    "granitemoe": _write_granite,
    "gpt-oss": lambda writer, raw: writer.add_sliding_window(raw["sliding_window"]),
    "glm4moe": _write_glm4_moe,
    "phi3": lambda writer, raw: writer.add_sliding_window(raw["sliding_window"] or 0),
    "gemma2": _write_gemma2,
    "gemma3": _write_gemma3,
}
