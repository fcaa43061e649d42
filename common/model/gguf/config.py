"""A GGUF file's metadata as the keys of a config.json. No torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from common.base.errors import ConfigError
from common.model.families.registry import FAMILIES
from common.model.gguf.architectures import ARCHITECTURES, GgufArchitecture, Metadata
from common.model.gguf.file import GgufFile, GgufTensor
from common.model.gguf.tokenizer import end_tokens

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
_LONG_FACTORS = {"rope_factors_long": "long_factor", "rope_factors_short": "short_factor"}
"""Tensors of longrope, and the rope parameters that they are."""
_DTYPES = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}


def gguf_architecture(file: GgufFile) -> GgufArchitecture:
    """How the file stores its model. Raises: ConfigError for an unsupported model."""
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[architecture]


def read_gguf_config(file: GgufFile) -> dict[str, Any]:
    """The file's metadata as the content of a config.json. Raises: ConfigError for an unsupported model."""
    architecture = gguf_architecture(file)
    prefix = f"{file.metadata['general.architecture']}."
    metadata = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    own = {key: metadata.get(name) for key, name in {**_KEYS, **architecture.keys}.items()}
    raw = {
        key: _short(value) if isinstance(value, float) else value
        for key, value in own.items()
        if value is not None and (key, value) != ("sliding_window", 0)
    }
    raw.update(architecture.more(metadata))
    _check(file, metadata, raw)
    name = architecture.transformers_class
    if raw.get("num_experts"):
        name = architecture.class_with_experts
        if not name:
            raise ConfigError(f"{file.path}: mixtures of experts of architecture {prefix[:-1]!r} are not supported")
        numbers = range(int(raw.get("num_hidden_layers", 0)))
        raw["mlp_only_layers"] = [i for i in numbers if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors]
    vocabulary = file.tensors.get("token_embd.weight")
    if vocabulary is None:
        raise ConfigError(f"{file.path} holds no tensor token_embd.weight")
    weight = file.tensors.get(f"blk.0.{architecture.names.q}.weight", vocabulary)
    raw.update(
        architectures=[name],
        norm_topk_prob=raw.get("norm_topk_prob", True),  # as llama.cpp computes architectures whose files do not say it
        use_qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        vocab_size=vocabulary.shape[0],
        tie_word_embeddings="output.weight" not in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        dtype=_DTYPES.get(weight.kind, "bfloat16"),
        eos_token_id=end_tokens(file) or None,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        rope_scaling=_read_scaling(file, metadata, architecture.rope),
        **{architecture.bias_key: f"blk.0.{architecture.names.q}.bias" in file.tensors},
    )
    keys = FAMILIES[name].config_keys
    return {keys.get(key, key): value for key, value in raw.items()}


def _check(file: GgufFile, metadata: Metadata, raw: dict[str, Any]) -> None:
    """Refuse what native families do not have. Raises: ConfigError."""
    if file.metadata.get("split.count", 1) > 1:
        raise ConfigError(f"{file.path} is one part of a model; join them with llama-gguf-split --merge")
    window = "attention.sliding_window"
    if metadata.get(window) and "sliding_window" not in raw:
        raise ConfigError(f"{file.path}: {window} is not supported in files of this architecture")
    if metadata.get("expert_shared_feed_forward_length"):
        raise ConfigError(f"{file.path}: shared experts of this architecture are not supported")
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int):
        head_dim = raw.get("head_dim", hidden // max(1, heads))
        whole = () if "partial_rotary_factor" in raw else ("rope.dimension_count",)
        for name in (*whole, "attention.value_length"):
            own = metadata.get(name, head_dim)
            if own != head_dim:
                raise ConfigError(f"{file.path}: {name} {own} differs from a head's {head_dim}, which is not supported")


def _read_scaling(file: GgufFile, metadata: Metadata, unsaid: Metadata) -> dict[str, Any] | None:
    """The rope parameters; `unsaid`: those that no key holds."""
    prefix = "rope.scaling."
    given = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    unknown = sorted(given.keys() - _SCALING_KEYS.keys() - {"type", "finetuned", "attn_factor"})
    if unknown:
        raise ConfigError(f"{file.path}: {prefix}{unknown[0]} is not supported")
    # As in llama.cpp; files of 2023 have the older key.
    kind = given.get("type", "linear")
    given.setdefault("factor", metadata.get("rope.scale_linear", 0.0))
    is_scaled = kind != "none" and not (kind == "linear" and given["factor"] in (0, 1))
    factors = {
        name: _read_factors(file, tensor)
        for name in ("rope_freqs", *_LONG_FACTORS)
        if (tensor := file.tensors.get(f"{name}.weight")) is not None
    }
    if factors and is_scaled and kind != "longrope":
        raise ConfigError(f"{file.path}: {next(iter(factors))}.weight together with rope.scaling is not supported")
    if "rope_freqs" in factors:
        return {"rope_type": "factors", "factors": factors["rope_freqs"]}
    scaling = {_SCALING_KEYS[key]: value for key, value in given.items() if key in _SCALING_KEYS}
    if factors:
        del scaling["factor"]
        scaling.update({_LONG_FACTORS[name]: numbers for name, numbers in factors.items()})
        if "attn_factor" in given:
            scaling["attention_factor"] = given["attn_factor"]
        return {"rope_type": "longrope", **scaling}
    if not is_scaled:
        return None
    if kind == "yarn" and "attn_factor" in given:  # a factor of YaRN's own, which depends on the factor of the context
        scaling["attention_factor"] = given["attn_factor"] * (0.1 * math.log(max(1.0, given["factor"])) + 1.0)
    return {"rope_type": kind, **scaling, **unsaid}


def _read_factors(file: GgufFile, tensor: GgufTensor) -> list[float]:
    if tensor.kind != GGMLQuantizationType.F32:
        raise ConfigError(f"{file.path}: tensor {tensor.name} is {tensor.kind.name}, not F32")
    factors = np.fromfile(file.path, "<f4", (tensor.hi - tensor.lo) // 4, offset=tensor.lo)
    return [_short(factor) for factor in factors.tolist()]


def _short(value: float) -> float:
    """A float32 as the shortest decimal number that config.json would have for it."""
    return float(f"{value:.7g}")
