"""Tiny configs of architectures that classes of transformers compute, by the name of their kind."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

_USUAL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "vocab_size": 250,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
_GPT = {"num_key_value_heads": None}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {**_EXPERTS, "head_dim": 16},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 24, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 32, "sliding_window": 24, "layer_types": None},
    "phi": {},
    "phi3": {"tie_word_embeddings": True},
    "gpt2": {**_GPT, "n_positions": 2048, "tie_word_embeddings": True},
    "gpt_neox": {**_GPT},
    "gpt_bigcode": {**_GPT, "n_positions": 2048},
    "opt": {**_GPT, "ffn_dim": 112, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"sliding_window": 24, "logit_scale": 0.5},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 24},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "starcoder2": {"sliding_window": None},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 0.7},
    "granitemoe": {**_LOCAL},
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 48},
    "mixtral": {**_LOCAL, "sliding_window": None},
    "phimoe": {**_LOCAL, "sliding_window": None},
    "deepseek_v3": {**_MLA, **_ROUTED, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_key_value_heads": 4},
    "nemotron": {},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {**_ROUTED, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
    "helium": {"head_dim": 16},
    "smollm3": {},
    "exaone4": {"sliding_window": None},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "seed_oss": {"head_dim": 16},
    "arcee": {"head_dim": 16},
    "apertus": {},
    "minimax_m2": {**_LOCAL, "head_dim": 16},
    "persimmon": {**_GPT},
    "hyperclovax": {},
    "jais2": {},
    "ministral3": {"head_dim": 16},
    "dots1": {**_ROUTED, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
    "minicpm3": {**_MLA, "num_key_value_heads": 4},
    "nanochat": {},
    "gpt_oss": {**_LOCAL, "head_dim": 16, "sliding_window": 24, "rope_parameters": None},
    "granite_swa": {"sliding_window": 24},
    "granitemoe_swa": {**_LOCAL, "sliding_window": 24},
    "flint": {**_EXPERTS, "head_dim": 16, "sliding_window": 24},
}


def config_of(kind: str, **more: Any) -> PretrainedConfig:
    """The tiny config of an architecture; `more` replaces some of its values."""
    values = {**_USUAL, **KINDS[kind], **more}
    return AutoConfig.for_model(kind, **{key: value for key, value in values.items() if value is not None})
