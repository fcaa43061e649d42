"""Converts a checkpoint of `checkpoints.py` to a GGUF file with bfloat16 matrices. Runs in llama.cpp's environment.

python to_gguf.py CHECKPOINT FILE
"""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3_moe": "qwen3moe"}
_EXPERT = re.compile(r"(?<=\.experts)\.\d+")


def gguf_name(name: str) -> str:
    """GGUF's name of a checkpoint's tensor; all experts of a layer are one tensor. Raises: KeyError if no family has it."""
    stem, _, kind = _EXPERT.sub("", name).rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    number, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_IN_LAYER[rest]}.{kind}"


def _natural(name: str) -> list[str]:
    """Sort key that puts expert 2 before expert 10."""
    return [part.zfill(8) if part.isdigit() else part for part in name.split(".")]


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """A safetensors file's tensors (dtype, shape, data_offsets) and the offset of its data."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def interleave_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads * head_dim, n] with each head's two rotary halves interleaved: the order of GGUF's Llama, not of its Qwen2."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _main(checkpoint: Path, target: Path) -> None:
    import gguf
    import numpy as np

    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    is_llama = config["model_type"] == "llama"
    unfinished = target.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(str(unfinished), _ARCHITECTURES[config["model_type"]], use_temp_file=True)
    _add_config(writer, config, gguf)
    _add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text("utf-8")), gguf)
    tensors, data_at = read_header(checkpoint / "model.safetensors")
    data = np.memmap(checkpoint / "model.safetensors", dtype=np.uint8, mode="r", offset=data_at)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]} if is_llama else {}
    parts: dict[str, list[np.ndarray]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: _natural(item[0])):
        begin, end = tensor["data_offsets"]
        words = data[begin:end].view(np.uint16).reshape(tensor["shape"])
        if len(words.shape) == 2 and (part := name.split(".")[-2]) in heads:
            words = interleave_halves(words, heads[part])
        parts.setdefault(gguf_name(name), []).append(words)
    for name, found in parts.items():
        words = np.stack(found) if "_exps." in name else found[0]
        if words.ndim == 1 or "ffn_gate_inp" in name:  # llama.cpp wants vectors and routers in float32
            writer.add_tensor(name, (words.astype(np.uint32) << 16).view(np.float32))
            continue
        raw = np.ascontiguousarray(words).view(np.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)


def _add_config(writer: Any, config: dict[str, Any], gguf: Any) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], gguf: Any) -> None:
    vocab = tokenizer["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(vocab))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
