// Passes over a row of logits: a mask, what log-probabilities need, and drawing a token, with the arithmetic of
// common/engine/sampling/gumbel.py.
#pragma once
#include <cmath>

#include "api.h"
#include "simd.h"

namespace KV_VARIANT {

constexpr int DRAW_BLOCK = 1024;  // tokens whose highest bound is kept

typedef int32_t IntPart __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

// The first `count` of sixteen numbers; the others are -infinity.
KV_INLINE Lanes load_first(const float* x, int count) {
    if (count >= LANES) return load(x);
    float whole[LANES];
    for (int i = 0; i < LANES; ++i) whole[i] = i < count ? x[i] : -INFINITY;
    return load(whole);
}

// kv_mask.
inline void masked_copy(const float* x, int size, const uint8_t* mask, int mask_bytes, float* out) {
    static const uint32_t BITS[LANES] = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                         1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    const Words bits = load_words(BITS);
    const FloatPart none = splat_part(-INFINITY);
    for (int i = 0; i < size; i += LANES) {
        const int byte = i / 8;
        const uint32_t allowed = (byte < mask_bytes ? mask[byte] : 0) | (byte + 1 < mask_bytes ? mask[byte + 1] << 8 : 0);
        Lanes a = load_first(x + i, size - i);
        KV_PARTS a.v[p] = (bits.v[p] & allowed) != 0 ? a.v[p] : none;
        if (size - i >= LANES) store(out + i, a);
        else store_some(out + i, a, size - i);
    }
}

class Draw {
  public:
    Draw(const kv_draw& draw, int size) : draw_(draw), size_(size), top_(splat(draw.top)), temperature_(splat(draw.temperature)) {}

    // maxima: scratch for [size / DRAW_BLOCK, rounded up].
    int32_t token(float* maxima) const {
        const int blocks = (size_ + DRAW_BLOCK - 1) / DRAW_BLOCK;
        int best = 0;
        for (int b = 0; b < blocks; ++b) {
            Lanes highest = zeros();
            for (int i = first(b); i < last(b); i += LANES) {
                Lanes w, v;
                at(i, w, v);
                highest = max(highest, w / v);
            }
            maxima[b] = largest(highest);
            if (maxima[b] > maxima[best]) best = b;
        }
        // w / v bounds w / e from above; the logarithm is taken only where the bound reaches the leader.
        double ratio = -1;
        int32_t token = 0;
        look(best, ratio, token);
        for (int b = 0; b < blocks; ++b)
            if (b != best && maxima[b] * SLACK >= ratio) look(b, ratio, token);
        return token;
    }

  private:
    static constexpr float SLACK = 1 + 1e-5f;

    int first(int block) const { return block * DRAW_BLOCK; }
    int last(int block) const { return first(block + 1) < size_ ? first(block + 1) : size_; }

    // Weights and uniform numbers of the tokens from i on.
    KV_INLINE void at(int i, Lanes& w, Lanes& v) const {
        w = exp((load_first(draw_.logits + i, size_ - i) - top_) / temperature_);
        static const uint32_t NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const Words numbers = load_words(NUMBERS);
        KV_PARTS {
            WordPart x = (numbers.v[p] + uint32_t(i)) * 0x9E3779B1u + draw_.key[0];
            x ^= x >> 16;
            x *= 0x85EBCA6Bu;
            x ^= WordPart{} + draw_.key[1];
            x ^= x >> 15;
            x *= 0xC2B2AE35u;
            x ^= x >> 16;
            v.v[p] = (__builtin_convertvector((IntPart)(x >> 1), FloatPart) + 0.5f) * 0x1p-31f;
        }
    }

    // The token of a block with the highest ratio, if that is above `ratio`; of two, the lower.
    void look(int block, double& ratio, int32_t& token) const {
        for (int i = first(block); i < last(block); i += LANES) {
            Lanes w, v;
            at(i, w, v);
            if (largest(w / v) * SLACK < ratio) continue;
            float weights[LANES], numbers[LANES];
            store(weights, w);
            store(numbers, v);
            for (int j = 0; j < LANES && i + j < size_; ++j) {
                const double u = numbers[j] < 1 - 0x1p-24 ? numbers[j] : 1 - 0x1p-24;
                const double found = weights[j] / -std::log1p(-u);
                if (found > ratio || (found == ratio && i + j < token)) ratio = found, token = i + j;
            }
        }
    }

    const kv_draw& draw_;
    const int size_;
    const Lanes top_, temperature_;
};

// log of the sum of e^(x - top) over x: [size]; maxima: [size / KV_MAXIMA_OF], the highest of as many numbers each.
inline double log_sum_exp_of(const float* x, int size, float top, float* maxima) {
    constexpr int PART = 1024;  // numbers that are summed in float32
    const Lanes highest = splat(top);
    double total = 0;
    int j = 0;
    for (; j + PART <= size; j += PART) {
        Lanes some = zeros();
        for (int k = j; k < j + PART; k += KV_MAXIMA_OF) {
            Lanes most = load(x + k);
            for (int i = k; i < k + KV_MAXIMA_OF; i += LANES) {
                const Lanes a = load(x + i);
                most = max(most, a);
                some = some + exp(a - highest);
            }
            maxima[k / KV_MAXIMA_OF] = largest(most);
        }
        total += sum(some);
    }
    for (int k = j; k + KV_MAXIMA_OF <= size; k += KV_MAXIMA_OF) {
        float most = x[k];
        for (int i = k; i < k + KV_MAXIMA_OF; ++i) most = x[i] > most ? x[i] : most;
        maxima[k / KV_MAXIMA_OF] = most;
    }
    for (; j < size; ++j) total += std::exp(double(x[j]) - top);
    return std::log(total);
}

}  // namespace KV_VARIANT
