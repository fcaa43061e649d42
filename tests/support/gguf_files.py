"""GGUF files made from models in Hugging Face format as llama.cpp's converter makes them, each with an equal folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.model.config import ModelConfig, load_model_config
from common.model.description import MixtureDescription, MlpDescription, multi_head
from common.model.rope import RopeConfig
from common.model.rotary import inverse_frequencies

Kind = GGMLQuantizationType

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "MixtralForCausalLM": "llama",
}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}


def gguf_name(name: str) -> str:
    """A tensor's name in a GGUF file."""
    for own, theirs in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")):
        if name.startswith(f"{own}."):
            return name.replace(own, theirs)
    _, _, number, part = name.split(".", 3)
    module, last = part.rsplit(".", 1)
    return f"blk.{number}.{_NAMES[module]}.{last}"


def _in_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Reorder rows of q and k as llama.cpp expects them for Llama models."""
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _out_of_pairs(tensor: Tensor, heads: int) -> Tensor:
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _random_blocks(kind: Kind, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random K-quant blocks with small factors; the gguf package reads this format but does not write it."""
    rng = np.random.default_rng(seed)
    size = {Kind.Q4_K: 144, Kind.Q6_K: 210}[kind]
    blocks = rng.integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
    factors = (rng.random((rows, columns // 256, 2)) * 2e-4).astype("<f2").view(np.uint8)
    if kind == Kind.Q4_K:
        blocks[..., :4] = factors
        blocks[..., 4] = 0  # the first group's scale: a group of equal weights
    else:
        blocks[..., -2:] = factors[..., :2]
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


def _add_scaling(writer: GGUFWriter, rope: RopeConfig, head_dim: int) -> None:
    if rope.kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
    if rope.kind == "llama3":
        plain_rope = inverse_frequencies(RopeConfig(rope.theta), head_dim)
        factors = plain_rope / inverse_frequencies(rope, head_dim)
        writer.add_tensor("rope_freqs.weight", factors.numpy())


def write_gguf(folder: Path, target: Path, kind_of: Callable[[str, Tensor], Kind]) -> tuple[Path, Path]:
    """Write `target`/model.gguf and, in `target`/plain, the Hugging Face folder with the weights that it means.

    `kind_of`: how a matrix is stored, of its Hugging Face name and weights; vectors are F32.
    """
    plain, file = target / "plain", target / "model.gguf"
    shutil.copytree(folder, plain)
    shutil.copy(folder / "tokenizer.json", target)
    shutil.copy(folder / "tokenizer_config.json", target)
    config = load_model_config(folder)
    rope, attention = config.layers[0].rope, multi_head(config.layers[0])
    assert rope is not None
    architecture = _ARCHITECTURES[config.architecture]
    writer = GGUFWriter(file, architecture)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    _add_mlps(writer, config)
    writer.add_head_count(attention.num_q_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(config.final_norm.eps)
    writer.add_rope_freq_base(rope.theta)
    writer.add_context_length(int(config.max_position_embeddings / (rope.factor if rope.kind == "linear" else 1)))
    writer.add_eos_token_id(config.eos_token_ids[0])
    assert config.bos_token_id is not None
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_token_list([f"w{i}" for i in range(config.vocab_size)])
    _add_scaling(writer, rope, attention.head_dim)
    heads = {"q_proj": attention.num_q_heads, "k_proj": attention.num_kv_heads} if architecture == "llama" else {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    kinds: dict[str, Kind] = {}
    for shard in folder.glob("*.safetensors"):
        means = {}
        for number, (name, tensor) in enumerate(load_file(shard).items()):
            paired = heads.get(name.split(".")[-2])
            weight = tensor.float() if paired is None else _in_pairs(tensor.float(), paired)
            kind = kind_of(name, tensor) if tensor.dim() == 2 else Kind.F32
            if kind in (Kind.Q4_K, Kind.Q6_K):
                stored = _random_blocks(kind, weight.size(0), weight.size(1), number)
            else:
                stored = quantize(weight.numpy(), kind)
            if match := _EXPERT.fullmatch(name):
                stacked = f"blk.{match[1]}.{_EXPERTS[match[3]]}.weight"
                experts.setdefault(stacked, {})[int(match[2])] = stored
                kinds[stacked] = kind
            else:
                writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
            found = torch.from_numpy(np.array(dequantize(stored, kind))).view(tensor.shape)
            means[name] = (found if paired is None else _out_of_pairs(found, paired)).contiguous()
        save_file(means, plain / shard.name)
    for name, each in experts.items():
        writer.add_tensor(name, np.stack([each[i] for i in range(len(each))]), raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, plain
