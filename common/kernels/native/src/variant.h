// One variant's functions, as api.h describes them. Every variant that is compiled in exports its table.
#pragma once
#include "api.h"

struct kv_variant {
    decltype(&kv_linear_forward) linear_forward;
    decltype(&kv_heads_forward) heads_forward;
    decltype(&kv_experts_forward) experts_forward;
    decltype(&kv_mixture_forward) mixture_forward;
    decltype(&kv_rotation_angles) rotation_angles;
    decltype(&kv_attention_forward) attention_forward;
    decltype(&kv_join_partials) join_partials;
    decltype(&kv_layer_attend) layer_attend;
    decltype(&kv_layer_rows) layer_rows;
    decltype(&kv_layer_project) layer_project;
    decltype(&kv_layer_mlp) layer_mlp;
    decltype(&kv_lora_add) lora_add;
    decltype(&kv_silu_and_mul) silu_and_mul;
    decltype(&kv_norm) norm;
    decltype(&kv_mask) mask;
    decltype(&kv_log_sum_exp) log_sum_exp;
    decltype(&kv_draw_tokens) draw_tokens;
};

#define KV_PASTE(a, b) a##b
#define KV_TABLE(name) KV_PASTE(kv_variant_, name)

extern const kv_variant kv_variant_amx, kv_variant_amx_emulated, kv_variant_avx512bf16, kv_variant_avx512, kv_variant_avx2, kv_variant_neonbf16, kv_variant_portable;
