// Paged attention straight from the KV blocks.
#pragma once
#include "api.h"
#include "simd.h"
#include "team.h"

namespace KV_VARIANT {

// Store one head's numbers of one token. plane: 0 for K, 1 for V; x: [head_dim].
inline void put_head(const kv_cache& cache, int plane, int64_t slot, int head, const float* x) {
    const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
    const int64_t at = ((block * cache.kv_heads + head) * cache.block_size + offset) * cache.head_dim;
    void* base = plane ? cache.v : cache.k;
    for (int d = 0; d < cache.head_dim; d += LANES) {
        const int count = cache.head_dim - d < LANES ? cache.head_dim - d : LANES;
        const Lanes a = load_some(x + d, count);
        if (cache.dtype == KV_F32)
            store_some(static_cast<float*>(base) + at + d, a, count);
        else
            store_some(static_cast<bf16*>(base) + at + d, a, count);
    }
}

// Called outside of run(), before `attend`.
inline void reserve_attention(kv_team&, const kv_cache&, const kv_batch&, int q_heads) { (void)q_heads; }

// Causal attention of all rows of the batch, whose K and V are in the cache. q, out: [rows][q_heads][head_dim], rows at a
// distance of the strides. Act is float or bf16.
template <class Act>
void attend(Worker& w, const kv_cache& cache, const kv_batch& batch, int q_heads, float scale, const Act* q,
            int64_t q_stride, Act* out, int64_t out_stride) {
    const int group = q_heads / cache.kv_heads, dim = cache.head_dim;
    w.for_each(batch.num_entries * q_heads, [&](int task) {
        const int entry = task / q_heads, head = task % q_heads;
        const int lo = batch.first_rows[entry], hi = batch.first_rows[entry + 1];
        const int32_t* blocks = batch.block_ids + batch.first_blocks[entry];
        const auto number = [&](const void* base, int token, int d) {
            const int64_t block = blocks[token / cache.block_size], offset = token % cache.block_size;
            const int64_t at =
                ((block * cache.kv_heads + head / group) * cache.block_size + offset) * dim + d;
            return cache.dtype == KV_F32 ? static_cast<const float*>(base)[at] : widen(static_cast<const bf16*>(base)[at]);
        };
        for (int row = lo; row < hi; ++row) {
            const int seen = batch.context_lens[entry] - (hi - 1 - row);
            float total = 0, top = -INFINITY, sums[1024] = {};
            for (int pass = 0; pass < 2; ++pass)
                for (int t = 0; t < seen; ++t) {
                    float score = 0;
                    for (int d = 0; d < dim; ++d) score += widen(q[row * q_stride + head * dim + d]) * number(cache.k, t, d);
                    score *= scale;
                    if (pass == 0) {
                        top = score > top ? score : top;
                        continue;
                    }
                    const float p = std::exp(score - top);
                    total += p;
                    for (int d = 0; d < dim; ++d) sums[d] += p * number(cache.v, t, d);
                }
            for (int d = 0; d < dim; d += LANES) {
                const int count = dim - d < LANES ? dim - d : LANES;
                store_some(out + row * out_stride + head * dim + d, load_some(sums + d, count) * splat(1 / total), count);
            }
        }
    });
}

}  // namespace KV_VARIANT
