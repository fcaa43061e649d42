// The C interface: the choice of a variant by what the processor has, and calls into it.
#include "api.h"

#include <cstring>
#include <system_error>

#include "team.h"
#include "variant.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

#if defined(__x86_64__)
// Registers that the operating system saves: bits 1, 2 for AVX; 5, 6, 7 for AVX-512; 17, 18 for tiles.
__attribute__((target("xsave"))) uint64_t saved_registers() { return _xgetbv(0); }

// Linux lets a process use tiles after it has asked for them, once; the threads that it starts may as well.
bool may_use_tiles() {
#if defined(__linux__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    static const bool is_granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
    return is_granted;
#else
    return false;
#endif
}

struct Features {
    bool amx = false, avx2 = false, avx512 = false, avx512bf16 = false, is_intel = false;

    Features() {
        unsigned a, b, c, d;
        is_intel = __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return;
        const bool has_fma = (c & bit_FMA) && (c & bit_F16C);
        const uint64_t saved = saved_registers();
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        avx2 = has_fma && (b & bit_AVX2) && (saved & 0x6) == 0x6;
        const unsigned tiles = 1u << 22 | 1u << 24 | 1u << 25;  // for bfloat16, as such, for int8
        const bool has_tiles = (d & tiles) == tiles && (saved & 0x60000) == 0x60000;
        const unsigned needed = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
        avx512 = avx2 && (b & needed) == needed && (c & (1u << 11)) && (saved & 0xe6) == 0xe6;  // bit 11: VNNI
        avx512bf16 = avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
        amx = avx512bf16 && has_tiles;
    }
};
#endif

struct Entry {
    const char* name;
    bool is_supported;
    const kv_variant* functions;
};

const kv_variant* chosen = nullptr;

}  // namespace

extern "C" {

int32_t kv_abi_version(void) { return 18; }

const char* kv_select_variant(const char* limit) {
#if defined(__x86_64__)
    static const Features has;
    const bool wants_amx = !*limit || !std::strcmp(limit, "amx");
    const bool has_amx = wants_amx && has.amx && may_use_tiles();
    // Intel's cores begin a bfloat16 product of 16 pairs every two cycles, and four multiply-adds of 16 float32 meanwhile.
    if (!*limit && has.is_intel && !has_amx) limit = "avx512";
    const Entry entries[] = {
        {"amx_emulated", *limit != 0, &kv_variant_amx_emulated},  // for tests
        {"amx", has_amx, &kv_variant_amx},
        {"avx512bf16", has.avx512bf16, &kv_variant_avx512bf16},
        {"avx512", has.avx512, &kv_variant_avx512},
        {"avx2", has.avx2, &kv_variant_avx2},
        {"portable", true, &kv_variant_portable},
    };
#elif defined(__aarch64__) && defined(__linux__)
    // Bit 14: bfloat16 products; bit 20: products of int8, which the variant is compiled with and bfloat16 does not imply.
    const bool has_neonbf16 = (getauxval(AT_HWCAP2) & (1ul << 14)) && (getauxval(AT_HWCAP) & (1ul << 20));
    const Entry entries[] = {{"neonbf16", has_neonbf16, &kv_variant_neonbf16}, {"portable", true, &kv_variant_portable}};
#else
    const Entry entries[] = {{"portable", true, &kv_variant_portable}};
#endif
    bool is_allowed = !*limit;
    for (const Entry& entry : entries) {
        is_allowed |= !std::strcmp(limit, entry.name);
        if (!is_allowed || !entry.is_supported) continue;
        chosen = entry.functions;
        return entry.name;
    }
    return nullptr;
}

kv_team* kv_team_new(int32_t threads) {
    try {
        return new kv_team(threads);
    } catch (const std::system_error&) {
        return nullptr;
    }
}

void kv_team_free(kv_team* team) { delete team; }

void kv_linear_forward(kv_team* team, const kv_linear* l, const void* x, int32_t x_dtype, int64_t x_stride, void* y,
                       int32_t y_dtype, int64_t y_stride, int32_t rows, int32_t activation) {
    chosen->linear_forward(team, l, x, x_dtype, x_stride, y, y_dtype, y_stride, rows, activation);
}

void kv_heads_forward(kv_team* team, const kv_linear* l, int32_t heads, const void* x, int64_t x_stride, int64_t x_head,
                      void* y, int64_t y_stride, int64_t y_head, int32_t dtype, int32_t rows) {
    chosen->heads_forward(team, l, heads, x, x_stride, x_head, y, y_stride, y_head, dtype, rows);
}

void kv_experts_forward(kv_team* team, const kv_experts* experts, const kv_choice* choice, const void* x, int32_t dtype,
                        float* out) {
    chosen->experts_forward(team, experts, choice, x, dtype, out);
}

void kv_mixture_forward(kv_team* team, const kv_mixture* mixture, const void* x, int32_t dtype, int32_t rows, void* out) {
    chosen->mixture_forward(team, mixture, x, dtype, rows, out);
}

void kv_rotation_angles(kv_team* team, const int64_t* positions, int32_t rows, const float* inverse_frequencies,
                        int32_t half, float* cos, float* sin) {
    chosen->rotation_angles(team, positions, rows, inverse_frequencies, half, cos, sin);
}

void kv_attention_forward(kv_team* team, const kv_cache* cache, const kv_batch* batch, int32_t q_heads, float scale,
                          int32_t dtype, const void* q, int64_t q_stride, const void* k, int64_t k_stride,
                          const void* v, int64_t v_stride, void* out) {
    chosen->attention_forward(team, cache, batch, q_heads, scale, dtype, q, q_stride, k, k_stride, v, v_stride, out);
}

void kv_join_partials(kv_team* team, const float* parts, int32_t stripes, int32_t rows, int32_t heads, int32_t dim,
                      const float* sinks, int32_t dtype, void* out) {
    chosen->join_partials(team, parts, stripes, rows, heads, dim, sinks, dtype, out);
}

void kv_layer_attend(kv_team* team, const kv_layer* layer, const kv_cache* cache, const kv_batch* batch,
                     const kv_rotation* rotation, const kv_lora* lora, void* residual, const void* delta) {
    chosen->layer_attend(team, layer, cache, batch, rotation, lora, residual, delta);
}

void kv_layer_rows(kv_team* team, const kv_layer* layer, int32_t rows, const kv_rotation* rotation, const kv_lora* lora,
                   void* residual, const void* delta, void* qkv) {
    chosen->layer_rows(team, layer, rows, rotation, lora, residual, delta, qkv);
}

void kv_layer_project(kv_team* team, const kv_layer* layer, int32_t rows, const kv_lora* lora, const void* attended,
                      void* delta) {
    chosen->layer_project(team, layer, rows, lora, attended, delta);
}

void kv_layer_mlp(kv_team* team, const kv_layer* layer, int32_t rows, const kv_lora* lora, void* residual,
                  void* delta) {
    chosen->layer_mlp(team, layer, rows, lora, residual, delta);
}

void kv_layers_forward(kv_team* team, int32_t count, const kv_layer* const* layers, const kv_cache* const* caches,
                       const kv_batch* const* batches, const kv_rotation* rotation, void* residual, void* delta) {
    for (int i = 0; i < count; ++i) {
        kv_layer_attend(team, layers[i], caches[i], batches[i], rotation, nullptr, residual, i ? delta : nullptr);
        kv_layer_project(team, layers[i], batches[i]->num_rows, nullptr, nullptr, delta);
        kv_layer_mlp(team, layers[i], batches[i]->num_rows, nullptr, residual, delta);
    }
}

void kv_model_forward(kv_team* team, const kv_model* model, const int64_t* token_ids, float* logits) {
    const kv_layer& first = *model->layers[0];
    const int32_t rows = model->batches[0]->num_rows;
    const size_t row_bytes = size_t(first.hidden) * (first.dtype == KV_F32 ? 4 : 2);
    const auto reserved = [&](kv_team::Use use) {
        team->buffers[use].reserve(rows * row_bytes);
        return team->buffers[use].as<char>();
    };
    char* residual = reserved(kv_team::RESIDUAL);
    char* delta = reserved(kv_team::DELTA);
    char* normed = reserved(kv_team::FINAL);
    for (int32_t row = 0; row < rows; ++row)
        std::memcpy(residual + row * row_bytes, static_cast<const char*>(model->embedding) + token_ids[row] * row_bytes, row_bytes);
    kv_layers_forward(team, model->num_layers, model->layers, model->caches, model->batches, &model->rotation, residual, delta);
    kv_norm(team, model->final_norm, model->final_eps, first.hidden, first.dtype, rows, residual, delta, normed);
    kv_linear_forward(team, model->lm_head, normed, first.dtype, first.hidden, logits, KV_F32, model->lm_head->out, rows, 0);
}

int32_t kv_check_batch(const kv_batch* batch, int32_t num_blocks, int32_t block_size) {
    for (int32_t i = 0; i < batch->num_entries; ++i) {
        const int32_t first = batch->first_rows[i], rows = batch->first_rows[i + 1] - first;
        if (rows < 1 || (!batch->row_ends && rows > batch->context_lens[i])) return KV_BATCH_ROWS;
        for (int32_t row = 0, start = 0, end = 0; batch->row_ends && row < rows; ++row) {
            const int32_t next_start = batch->row_starts[first + row], next_end = batch->row_ends[first + row];
            if (next_start < start || next_end < end || next_start > next_end || next_end > batch->context_lens[i])
                return KV_BATCH_ROWS;
            start = next_start, end = next_end;
        }
    }
    for (int32_t i = 0; i < batch->first_blocks[batch->num_entries]; ++i)
        if (batch->block_ids[i] < 0 || batch->block_ids[i] >= num_blocks) return KV_BATCH_BLOCK;
    for (int32_t i = 0; i < batch->num_rows; ++i)
        if (batch->slots[i] < (batch->row_ends ? -1 : 0) || batch->slots[i] >= int64_t(num_blocks) * block_size) return KV_BATCH_SLOT;
    return KV_BATCH_OK;
}

void kv_lora_add(kv_team* team, const kv_lora_term* terms, int32_t count, const kv_lora_run* runs, int32_t dtype,
                 const void* x, int64_t x_stride, void* y, int32_t y_dtype, int64_t y_stride) {
    chosen->lora_add(team, terms, count, runs, dtype, x, x_stride, y, y_dtype, y_stride);
}

void kv_silu_and_mul(kv_team* team, const void* x, int32_t dtype, int32_t rows, int32_t half, void* out) {
    chosen->silu_and_mul(team, x, dtype, rows, half, out);
}

void kv_norm(kv_team* team, const float* weight, float eps, int32_t hidden, int32_t dtype, int32_t rows, void* residual,
             const void* delta, void* out) {
    chosen->norm(team, weight, eps, hidden, dtype, rows, residual, delta, out);
}

void kv_mask(kv_team* team, const float* x, int32_t size, const uint8_t* mask, int32_t mask_bytes, float* out) {
    chosen->mask(team, x, size, mask, mask_bytes, out);
}

void kv_log_sum_exp(kv_team* team, const float* x, int64_t stride, int32_t size, const int32_t* indices, int32_t count,
                    const float* highest, double* out, float* maxima) {
    chosen->log_sum_exp(team, x, stride, size, indices, count, highest, out, maxima);
}

void kv_draw_tokens(kv_team* team, const kv_draw* draws, int32_t count, int32_t size, int32_t* out) {
    chosen->draw_tokens(team, draws, count, size, out);
}
}
