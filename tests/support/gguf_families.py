"""Tiny models of every family that GGUF files hold, without what these files cannot say."""

from __future__ import annotations

from pathlib import Path

from support.oracle import TINY, make_tiny, write_model
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    PretrainedConfig,
    SmolLM3Config,
    Starcoder2Config,
)

_SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 160,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24, "tie_word_embeddings": True}
_OWN: dict[str, PretrainedConfig] = {
    "smollm3": SmolLM3Config(**_SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 2e6}),
    "starcoder2": Starcoder2Config(**_SHAPE, sliding_window=None),
    "gemma2": Gemma2Config(**_SHAPE, **_GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=10.0),
    "gemma3": Gemma3TextConfig(**{**_SHAPE, "num_hidden_layers": 6}, **_GEMMA),
}
"""Windows of StarCoder2, layers of SmolLM3 without rope and scales of Gemma's attention are not in the files."""
FAMILIES = (
    *(
        "llama",
        "llama-biases",
        "llama-linear",
        "qwen2",
        "qwen3",
        "phi3",
        "phi3-longrope",
        "granite",
        "olmo2",
        "gpt2",
    ),
    *_OWN,
)


def make_family(name: str, folder: Path) -> Path:
    """Write the model `name` of `FAMILIES` to `folder`. Returns `folder`."""
    return write_model(_OWN[name], folder) if name in _OWN else make_tiny(name, folder)


def vocab_size(name: str) -> int:
    """Of the model `name`."""
    return (_OWN[name] if name in _OWN else TINY[name].config).vocab_size
