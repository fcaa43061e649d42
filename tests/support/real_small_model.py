"""The real small model of `scripts/fetch-small-model`, as transformers computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from support.gguf_files import gguf_name, out_of_pairs
from transformers import AutoTokenizer, LlamaConfig

from scripts.small_model import small_model

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
"""Of the original checkpoint."""


def fetched() -> Path:
    """The model's file. Without it the test is skipped and counted."""
    file = small_model()
    if file is None:
        pytest.skip("the real small model is not on this machine: scripts/fetch-small-model")
    return file


def to_transformers(file: Path, folder: Path) -> Path:
    """Write the model as a Hugging Face folder with float32 weights. Returns `folder`."""
    tensors = {}
    for tensor in GGUFReader(file).tensors:
        name = _NAMES[tensor.name]
        weights = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32))
        heads = {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2])
        tensors[name] = (weights if heads is None else out_of_pairs(weights, heads)).contiguous()
    LlamaConfig(**_CONFIG).save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)
    return folder


def _names() -> dict[str, str]:
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    parts += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
    layers = [f"model.layers.{number}.{part}.weight" for number in range(30) for part in parts]
    return {gguf_name(name): name for name in ("model.embed_tokens.weight", "model.norm.weight", *layers)}


_NAMES = _names()


def prompt_ids(folder: Path, question: str) -> list[int]:
    """What transformers makes of a user's question."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False).input_ids
