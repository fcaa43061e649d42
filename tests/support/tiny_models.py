"""Configs of tiny models of every supported family, and of their variants. `support.oracle` writes the models."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

_COMMON = {
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "beta_fast": 16.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.7 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Tiny:
    """One model: its transformers config, and how many bytes a weight file may hold."""

    config: PretrainedConfig
    max_shard_size: str = "50GB"

    @property
    def vocab_size(self) -> int:
        return self.config.get_text_config().vocab_size


def _shape(hidden: int, q_heads: int, kv_heads: int, inner: int, vocab: int, *, tied: bool) -> dict[str, object]:
    return {
        **_COMMON,
        "hidden_size": hidden,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


_GEMMA3 = {
    **_shape(64, 4, 2, 112, 264, tied=True),
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "attn_logit_softcapping": 2.0,  # which its classes ignore
    "final_logit_softcapping": 20.0,
    "pad_token_id": 0,
}
_LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.3,
}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 14}

TINY: dict[str, Tiny] = {
    "llama": Tiny(LlamaConfig(**_shape(64, 4, 4, 112, 250, tied=False))),
    "mqa": Tiny(LlamaConfig(**_shape(64, 4, 1, 112, 263, tied=True))),
    "llama-biases": Tiny(LlamaConfig(**_shape(64, 4, 2, 112, 251, tied=True), attention_bias=True, mlp_bias=True)),
    "llama3": Tiny(LlamaConfig(**_shape(64, 4, 2, 96, 320, tied=True), rope_parameters=_LLAMA3_ROPE)),
    "large-vocabulary": Tiny(LlamaConfig(**_shape(64, 4, 2, 112, 152_000, tied=True))),
    "llama-linear": Tiny(
        LlamaConfig(
            **_shape(48, 6, 3, 80, 199, tied=False),
            rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
        )
    ),
    "mistral": Tiny(MistralConfig(**_shape(64, 4, 2, 112, 257, tied=False), sliding_window=40)),
    "qwen2": Tiny(
        Qwen2Config(
            **_shape(112, 14, 2, 160, 301, tied=True), rope_parameters={"rope_theta": 1e6, "rope_type": "default"}
        )
    ),
    "qwen2-window": Tiny(
        Qwen2Config(
            **_shape(64, 4, 2, 112, 302, tied=True), use_sliding_window=True, sliding_window=24, max_window_layers=1
        )
    ),
    "qwen3": Tiny(Qwen3Config(**_shape(64, 4, 2, 112, 259, tied=False), head_dim=32), max_shard_size="100KB"),
    "phi3": Tiny(
        Phi3Config(
            **_shape(64, 4, 2, 112, 253, tied=True),
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
            sliding_window=30,
            pad_token_id=0,
        )
    ),
    "phi3-longrope": Tiny(
        Phi3Config(
            **_shape(64, 4, 4, 112, 254, tied=False),
            rope_parameters=_LONGROPE,
            original_max_position_embeddings=32,
            pad_token_id=0,
        )
    ),
    "granite": Tiny(
        GraniteConfig(
            **_shape(64, 4, 2, 112, 255, tied=True),
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.6,
            logits_scaling=0.7,
        )
    ),
    "smollm3": Tiny(
        SmolLM3Config(
            **_shape(64, 4, 2, 112, 256, tied=True),
            no_rope_layers=[1, 0, 1],
            use_sliding_window=True,
            sliding_window=24,
            pad_token_id=0,
            rope_parameters={"rope_type": "default", "rope_theta": 2e6},
        )
    ),
    "olmo2": Tiny(Olmo2Config(**_shape(64, 4, 2, 112, 258, tied=False))),
    "starcoder2": Tiny(Starcoder2Config(**_shape(64, 4, 2, 128, 260, tied=True), sliding_window=48)),
    "gpt2": Tiny(GPT2Config(**_COMMON, n_embd=64, n_layer=3, n_head=4, vocab_size=261)),
    "opt": Tiny(
        OPTConfig(**_COMMON, hidden_size=64, ffn_dim=112, num_attention_heads=4, vocab_size=262, word_embed_proj_dim=64)
    ),
    "gemma2": Tiny(
        Gemma2Config(
            **_shape(64, 4, 2, 112, 265, tied=True),
            head_dim=32,
            query_pre_attn_scalar=4,
            sliding_window=24,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=10.0,
            pad_token_id=0,
        )
    ),
    "gemma3": Tiny(Gemma3TextConfig(**_GEMMA3)),
    "gemma3-vision": Tiny(
        Gemma3Config(
            text_config={**_GEMMA3, "vocab_size": 266},  # The class that takes images caps no logits either.
            vision_config={**_VISION, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28},
            mm_tokens_per_image=4,
            eos_token_id=2,
            bos_token_id=1,
        )
    ),
    "qwen2.5-vl": Tiny(
        Qwen2_5_VLConfig(
            text_config={
                **_shape(64, 4, 2, 112, 267, tied=False),
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            },
            vision_config={**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
            image_token_id=3,
            video_token_id=4,
            vision_start_token_id=5,
            tie_word_embeddings=False,
        )
    ),
    "qwen3-moe": Tiny(
        Qwen3MoeConfig(
            **_shape(64, 4, 2, 112, 268, tied=False),
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=48,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        )
    ),
    "mixtral": Tiny(MixtralConfig(**_shape(64, 4, 2, 80, 269, tied=False), num_local_experts=4, sliding_window=40)),
    "gpt-oss": Tiny(
        GptOssConfig(
            **_shape(64, 8, 2, 48, 270, tied=False),
            head_dim=16,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=24,
            rope_parameters={**_YARN_ROPE, "truncate": False},
        )
    ),
    "glm4-moe": Tiny(
        Glm4MoeConfig(
            **_shape(64, 4, 2, 112, 271, tied=False),
            head_dim=32,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=48,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.7,
        )
    ),
    "granite-moe": Tiny(
        GraniteMoeConfig(
            **_shape(64, 4, 2, 48, 272, tied=True),
            num_local_experts=5,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.6,
            logits_scaling=0.7,
        )
    ),
    "deepseek-v2": Tiny(
        DeepseekV2Config(
            **_shape(64, 4, 4, 112, 304, tied=False),
            **_LATENT,
            q_lora_rank=None,
            topk_method="greedy",
            rope_parameters={**_YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707},
        )
    ),
    "deepseek-v2-groups": Tiny(
        DeepseekV2Config(
            **_shape(64, 4, 4, 112, 306, tied=False),
            **_LATENT,
            q_lora_rank=40,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
        )
    ),
    "deepseek-v3": Tiny(
        DeepseekV3Config(
            **_shape(64, 4, 4, 112, 305, tied=False),
            **{**_LATENT, "v_head_dim": 32, "moe_intermediate_size": 48},
            q_lora_rank=40,
            n_group=4,
            topk_group=2,
            rope_parameters={**_YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 1.2},
        )
    ),
    "qwen2-yarn": Tiny(Qwen2Config(**_shape(64, 4, 2, 96, 303, tied=False), rope_parameters=_YARN_ROPE)),
}
