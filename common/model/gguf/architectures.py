"""The architectures of GGUF files that can be served: which class of transformers each is, and how llama.cpp stores it. No torch.

Source: the classes of ggml-org/llama.cpp's convert_hf_to_gguf.py, and src/llama-model.cpp for what no key holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from common.model.description import ExpertNames, WeightNames

Metadata = Mapping[str, Any]
"""The values of one architecture, without its name and the dot before their keys."""

GGUF_NAMES = WeightNames(
    embedding="token_embd",
    positions="position_embd",
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
    sinks="attn_sinks.weight",
    output="attn_output",
    attention_output_norm="post_attention_norm",
    mlp_norm="ffn_norm",
    mlp_output_norm="post_ffw_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)
GGUF_EXPERT_NAMES = ExpertNames(
    router="ffn_gate_inp",
    selection_bias="exp_probs_b.bias",
    gate="ffn_gate.{expert}",
    up="ffn_up.{expert}",
    down="ffn_down.{expert}",
    stacked_gate="ffn_gate_exps.weight",
    stacked_up="ffn_up_exps.weight",
    stacked_down="ffn_down_exps.weight",
    shared_gate="ffn_gate_shexp",
    shared_up="ffn_up_shexp",
    shared_down="ffn_down_shexp",
)
_MERGED_QKV = replace(GGUF_NAMES, q="attn_qkv", k="attn_qkv", v="attn_qkv")
_MLP_NORM_AFTER_ATTENTION = replace(GGUF_NAMES, mlp_norm="post_attention_norm")

_HEAD = ("embedding_length", "attention.head_count")
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
"""Gemma's largest models have another scale of attention, which no key holds."""


@dataclass(frozen=True)
class GgufArchitecture:
    """One architecture."""

    transformers_class: str
    names: WeightNames = GGUF_NAMES
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    """Keys of config.json that only this architecture has, and what they are called in the metadata."""
    more: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}
    """Values of config.json that follow from several keys."""
    pairs_rows: bool = False
    """Whether the rows of q and k are stored in pairs, for the other kind of rope."""
    norm_offset: float = 0.0
    """What was added to all RMS norms' weights."""
    class_with_experts: str = ""
    """The class of its files that have experts; empty: those are refused."""
    bias_key: str = "attention_bias"
    """The key of config.json that says whether q, k and v have biases."""
    rope: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Rope parameters of scaled models that no key holds."""


def _quotient(metadata: Metadata, total: str, parts: str) -> int | None:
    """How many of `total` each of `parts` has; None if the file does not say it."""
    whole, count = metadata.get(total), metadata.get(parts)
    return whole // count if isinstance(whole, int) and isinstance(count, int) and count > 0 else None


def _partly_rotated(metadata: Metadata) -> dict[str, Any]:
    """How much of each head is rotated, where the file says it."""
    head_dim = metadata.get("attention.key_length") or _quotient(metadata, *_HEAD)
    rotated = metadata.get("rope.dimension_count")
    return {"partial_rotary_factor": rotated / head_dim} if head_dim and type(rotated) is int else {}


def _glm4_moe(metadata: Metadata) -> dict[str, Any]:
    """The last blocks, which predict further tokens, are no layers."""
    blocks, further = metadata.get("block_count"), metadata.get("nextn_predict_layers", 0)
    layers = {"num_hidden_layers": blocks - further} if type(blocks) is type(further) is int else {}
    return {**_partly_rotated(metadata), **layers}


def _gemma_scale(metadata: Metadata, largest: int) -> dict[str, Any]:
    """The scale is that of a head; in the largest model it is that of the mean width of a query head."""
    is_largest = metadata.get("block_count") == largest
    return {
        "query_pre_attn_scalar": _quotient(metadata, *_HEAD) if is_largest else metadata.get("attention.key_length")
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    return {**_gemma_scale(metadata, _GEMMA3_27B_LAYERS), **_windows(metadata)}


def _windows(metadata: Metadata) -> dict[str, Any]:
    """Which layers have a window, where the file says it: a number n, if every n-th layer has none, or a flag for each layer."""
    pattern = metadata.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern]}
    return {} if pattern is None else {"sliding_window_pattern": pattern}


_WINDOW = {"sliding_window": "attention.sliding_window"}
_ORIGINAL = {"original_max_position_embeddings": "rope.scaling.original_context_length"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}

_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", pairs_rows=True, class_with_experts="MixtralForCausalLM"),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen2vl": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", class_with_experts="Qwen3MoeForCausalLM"),
    "phi3": GgufArchitecture(
        "Phi3ForCausalLM", replace(_MERGED_QKV, gate="ffn_up"), {**_WINDOW, **_ORIGINAL}, _partly_rotated
    ),
    "granite": GgufArchitecture("GraniteForCausalLM", keys=_GRANITE, pairs_rows=True),
    "granitemoe": GgufArchitecture(
        "GraniteMoeForCausalLM", keys=_GRANITE, pairs_rows=True, class_with_experts="GraniteMoeForCausalLM"
    ),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", pairs_rows=True),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM"),
    "starcoder2": GgufArchitecture(
        "Starcoder2ForCausalLM", keys={"norm_epsilon": "attention.layer_norm_epsilon"}, bias_key="use_bias"
    ),
    "gpt2": GgufArchitecture("GPT2LMHeadModel", _MERGED_QKV, {"layer_norm_epsilon": "attention.layer_norm_epsilon"}),
    "gemma2": GgufArchitecture(
        "Gemma2ForCausalLM",
        keys={**_WINDOW, **_CAPS},
        more=lambda metadata: _gemma_scale(metadata, _GEMMA2_27B_LAYERS),
        norm_offset=1.0,
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM",
        keys={**_WINDOW, **_CAPS, "rope_local_base_freq": "rope.freq_base_swa"},
        more=_gemma3,
        norm_offset=1.0,
    ),
    "gpt-oss": GgufArchitecture(
        "GptOssForCausalLM",
        _MLP_NORM_AFTER_ATTENTION,
        {**_WINDOW, "intermediate_size": "expert_feed_forward_length"},
        _windows,
        class_with_experts="GptOssForCausalLM",
        rope={"truncate": False},
    ),
    "glm4moe": GgufArchitecture(
        "Glm4MoeForCausalLM",
        _MLP_NORM_AFTER_ATTENTION,
        {
            "first_k_dense_replace": "leading_dense_block_count",
            "n_shared_experts": "expert_shared_count",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
            "norm_topk_prob": "expert_weights_norm",
            "routed_scaling_factor": "expert_weights_scale",
        },
        _glm4_moe,
        class_with_experts="Glm4MoeForCausalLM",
    ),
}
"""By `general.architecture`. Mistral's files are `llama`, without its window, as llama.cpp computes them."""
