// Passes over a row of logits: a mask, sums and maxima for log-probabilities, and the draw of a token, with the arithmetic of
// common/engine/sampling/gumbel.py.
#pragma once
#include <cmath>

#include "linear.h"

namespace KV_VARIANT {

constexpr int DRAW_BLOCK = 1024;  // tokens whose highest bound is kept

// The first `count` of sixteen numbers; the others are -infinity.
KV_INLINE Lanes load_first(const float* x, int count) {
    if (count >= LANES) return load(x);
    float whole[LANES];
    for (int i = 0; i < LANES; ++i) whole[i] = i < count ? x[i] : -INFINITY;
    return load(whole);
}

// kv_mask.
inline void masked_copy(const float* x, int size, const uint8_t* mask, int mask_bytes, float* out) {
    Words bits = load_words(LANE_NUMBERS);
    KV_PARTS bits.v[p] = (WordPart{} + 1) << bits.v[p];
    const FloatPart none = splat_part(-INFINITY);
    for (int i = 0; i < size; i += LANES) {
        const int byte = i / 8;
        const uint32_t allowed = (byte < mask_bytes ? mask[byte] : 0) | (byte + 1 < mask_bytes ? mask[byte + 1] << 8 : 0);
        Lanes a = load_first(x + i, size - i);
        KV_PARTS a.v[p] = (bits.v[p] & allowed) != 0 ? a.v[p] : none;
        write(out + i, a, std::min(size - i, LANES));
    }
}

class Draw {
  public:
    Draw(const kv_draw& draw, int size) : draw_(draw), size_(size), top_(splat(draw.top)), temperature_(splat(draw.temperature)) {}

    // maxima: scratch for [size / DRAW_BLOCK, rounded up].
    int32_t token(float* maxima) const {
        const int blocks = ceil_div(size_, DRAW_BLOCK);
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
        // w / v bounds w / e from above. The logarithm is taken only of tokens whose bound reaches the highest ratio so far.
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
    int last(int block) const { return std::min(first(block + 1), size_); }

    // Weights and uniform numbers of the tokens from i on.
    KV_INLINE void at(int i, Lanes& w, Lanes& v) const {
        w = exp((load_first(draw_.logits + i, size_ - i) - top_) / temperature_);
        const Words numbers = load_words(LANE_NUMBERS);
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

    // Updates `ratio` and `token` if a token of the block has a higher ratio, or the same and a lower number.
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
