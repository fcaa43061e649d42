"""A GGUF file's metadata as the keys of a config.json, and the names of its tensors. No torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from common.base.errors import ConfigError
from common.model.description import ExpertNames, WeightNames
from common.model.gguf.file import GgufFile, open_gguf

GGUF_NAMES = WeightNames(
    embedding="token_embd",
    layer="blk.{number}",
    final_norm="output_norm",
    lm_head="output",
    input_norm="attn_norm",
    attention="attn",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    output="attn_output",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)
GGUF_EXPERT_NAMES = ExpertNames(
    router="ffn_gate_inp",
    gate="ffn_gate.{expert}",
    up="ffn_up.{expert}",
    down="ffn_down.{expert}",
    stacked_gate="ffn_gate_exps.weight",
    stacked_up="ffn_up_exps.weight",
    stacked_down="ffn_down_exps.weight",
)
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_WITH_EXPERTS = {"llama": "MixtralForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
"""The same of files that have experts."""
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""Keys of config.json, and what they are called in the metadata, after the architecture."""
_SCALING_KEYS = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""llama.cpp's names for the rope parameters of config.json."""
_DTYPES = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The file's metadata as the content of a config.json. Raises: ConfigError for a broken file or an unsupported model."""
    file = open_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"{path}: architecture {architecture!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )
    own = {key: file.metadata.get(f"{architecture}.{name}") for key, name in _KEYS.items()}
    # A float32 is written as the shortest decimal number that config.json would have for it.
    raw = {
        key: float(f"{value:.7g}") if isinstance(value, float) else value
        for key, value in own.items()
        if value is not None
    }
    _check(file, architecture, raw)
    if raw.get("num_experts"):
        numbers = range(int(raw.get("num_hidden_layers", 0)))
        raw["mlp_only_layers"] = [i for i in numbers if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors]
    vocabulary = file.tensors.get("token_embd.weight")
    if vocabulary is None:
        raise ConfigError(f"{path} holds no tensor token_embd.weight")
    weight = file.tensors.get("blk.0.attn_q.weight", vocabulary)
    ends = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    raw.update(
        architectures=[(_WITH_EXPERTS if raw.get("num_experts") else _ARCHITECTURES)[architecture]],
        norm_topk_prob=True,  # as llama.cpp computes the architectures that have experts
        vocab_size=vocabulary.shape[0],
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        dtype=_DTYPES.get(weight.kind, "bfloat16"),
        eos_token_id=[*dict.fromkeys(end for end in ends if end is not None)] or None,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        rope_scaling=_read_scaling(file, architecture),
    )
    return raw


def _check(file: GgufFile, architecture: str, raw: dict[str, Any]) -> None:
    """Refuse what native families do not have. Raises: ConfigError."""
    if file.metadata.get(f"{architecture}.expert_count") and architecture not in _WITH_EXPERTS:
        raise ConfigError(f"{file.path}: mixtures of experts of architecture {architecture!r} are not supported")
    if file.metadata.get("split.count", 1) > 1:
        raise ConfigError(f"{file.path} is one part of a model; join them with llama-gguf-split --merge")
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int):
        head_dim = raw.get("head_dim", hidden // max(1, heads))
        for name in ("rope.dimension_count", "attention.value_length"):
            own = file.metadata.get(f"{architecture}.{name}", head_dim)
            if own != head_dim:
                raise ConfigError(f"{file.path}: {name} {own} differs from a head's {head_dim}, which is not supported")


def _read_scaling(file: GgufFile, architecture: str) -> dict[str, Any] | None:
    prefix = f"{architecture}.rope.scaling."
    given = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    unknown = sorted(given.keys() - _SCALING_KEYS.keys() - {"type", "finetuned", "attn_factor"})
    if unknown:
        raise ConfigError(f"{file.path}: {prefix}{unknown[0]} is not supported")
    # As in llama.cpp; files of 2023 have the older key.
    kind = given.get("type", "linear")
    given.setdefault("factor", file.metadata.get(f"{architecture}.rope.scale_linear", 0.0))
    is_scaled = kind != "none" and not (kind == "linear" and given["factor"] in (0, 1))
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        if is_scaled:
            raise ConfigError(f"{file.path}: rope_freqs.weight together with rope.scaling is not supported")
        if factors.kind != GGMLQuantizationType.F32:
            raise ConfigError(f"{file.path}: tensor rope_freqs.weight is {factors.kind.name}, not F32")
        numbers = np.fromfile(file.path, "<f4", (factors.hi - factors.lo) // 4, offset=factors.lo)
        return {"rope_type": "factors", "factors": numbers.tolist()}
    if not is_scaled:
        return None
    scaling = {_SCALING_KEYS[key]: value for key, value in given.items() if key in _SCALING_KEYS}
    if kind == "yarn" and "attn_factor" in given:  # a factor of YaRN's own, which depends on the factor of the context
        scaling["attention_factor"] = given["attn_factor"] * (0.1 * math.log(max(1.0, given["factor"])) + 1.0)
    return {"rope_type": kind, **scaling}
