"""What config.json says about rotary embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from support.oracle import TINY
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.model.config import load_model_config
from common.model.layers import inverse_frequencies

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1792,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rope_theta": 500000.0,
    "vocab_size": 1000,
}
LLAMA3_OLD_KEYS = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_llama3_rope_scaling_equals_transformers_for_old_and_new_keys(tmp_path: Path) -> None:
    old = load_model_config(write(tmp_path, {**LLAMA, "rope_scaling": LLAMA3_OLD_KEYS}))
    new = load_model_config(write(tmp_path, {**LLAMA, "rope_parameters": {**LLAMA3_OLD_KEYS, "rope_theta": 500000.0}}))
    assert old == new
    theirs = TINY["llama3"].config.__class__(
        hidden_size=1792, num_attention_heads=14, rope_parameters={**LLAMA3_OLD_KEYS, "rope_theta": 500000.0}
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(old.rope, old.head_dim), expected, rtol=1e-6, atol=0)
