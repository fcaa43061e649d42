// Integer weights: int8 with rows rounded to int8, and int4 in groups that share a scale, with floating-point rows.
#pragma once
#include "linear.h"

namespace KV_VARIANT {

typedef int32_t IntPart __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

struct Ints {
    IntPart v[PARTS];
};

KV_INLINE Lanes as_lanes(Ints a) {
    Lanes r;
    KV_PARTS r.v[p] = __builtin_convertvector(a.v[p], FloatPart);
    return r;
}

// Rows are stored as code + OFFSET: AVX-512 multiplies unsigned rows by signed weights.
#if defined(__AVX512VNNI__)
constexpr int OFFSET = 128;
#else
constexpr int OFFSET = 0;
#endif

// acc[i] += the sum of four products: of row codes in `row`, and of weight codes in lane i of `weights`.
KV_INLINE Ints dot_four(Ints acc, Words weights, uint32_t row) {
#if defined(__AVX512VNNI__)
    acc.v[0] = (IntPart)_mm512_dpbusd_epi32((__m512i)acc.v[0], _mm512_set1_epi32((int)row), (__m512i)weights.v[0]);
#elif defined(__AVX2__)
    const __m256i rows = _mm256_set1_epi32((int)row), ones = _mm256_set1_epi16(1);
    KV_PARTS {
        // |weight| * (row with the weight's sign): pairs of them fit 16 bits, because codes are at most 127.
        const __m256i w = (__m256i)weights.v[p];
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(rows, w));
        acc.v[p] += (IntPart)_mm256_madd_epi16(pairs, ones);
    }
#elif defined(__ARM_FEATURE_DOTPROD)
    KV_PARTS acc.v[p] = (IntPart)vdotq_s32((int32x4_t)acc.v[p], (int8x16_t)weights.v[p], vreinterpretq_s8_u32(vdupq_n_u32(row)));
#else
    for (int byte = 0; byte < 4; ++byte) {
        const int32_t x = (int32_t)(row << (24 - 8 * byte)) >> 24;
        KV_PARTS acc.v[p] += ((IntPart)(weights.v[p] << (24 - 8 * byte)) >> 24) * x;
    }
#endif
    return acc;
}

struct Int8Weights {
    using Act = uint8_t;
    static int64_t panel_bytes(const kv_linear& l) { return int64_t(l.in + 3) / 4 * PANEL * 4; }

    template <int ROWS>
    static KV_INLINE void multiply(const kv_linear& l, int panel_index, const char* w, int64_t ahead,
                                   Rows<uint8_t> rows, Tile<ROWS>& acc) {
        Ints sums[ROWS][2] = {};
        for (int k = 0; k < l.in; k += 4, w += PANEL * 4) {
            __builtin_prefetch(w + ahead);
            __builtin_prefetch(w + ahead + CACHE_LINE);
            const Words w0 = load_words(w), w1 = load_words(w + CACHE_LINE);
            for (int m = 0; m < ROWS; ++m) {
                uint32_t four;
                std::memcpy(&four, rows[m] + k, 4);
                sums[m][0] = dot_four(sums[m][0], w0, four);
                sums[m][1] = dot_four(sums[m][1], w1, four);
            }
        }
        for (int half = 0; half < 2; ++half) {
            const int at = panel_index * PANEL + half * LANES;
            const Lanes scale = load(l.scale + at);
            Ints added{};  // by OFFSET in each row code: OFFSET times the sum of an output's codes
            if (OFFSET) KV_PARTS added.v[p] = __builtin_convertvector(load(l.zero + at).v[p], IntPart) * OFFSET;
            for (int m = 0; m < ROWS; ++m) {
                KV_PARTS sums[m][half].v[p] -= added.v[p];
                acc[m][half] = as_lanes(sums[m][half]) * (scale * splat(rows.scales[m]));
            }
        }
    }
};

inline int64_t code_stride(const kv_linear& l) { return (l.in + 3) / 4 * 4 + CACHE_LINE; }

// code = round(x / scale), half to even, with scale = max|x| / 127 for each row.
template <class Act>
void quantize_rows(Worker& w, const kv_linear& l, const Act* x, int64_t stride, int num_rows, uint8_t* codes,
                   float* scales) {
    w.for_each(num_rows, [&](int row) {
        const Act* from = x + row * stride;
        uint8_t* to = codes + row * code_stride(l);
        Lanes top = zeros(), poison = zeros();  // poison: not-a-number if the row holds that or infinity
        for (int i = 0; i < l.in; i += LANES) {
            const Lanes a = load_some(from + i, l.in - i < LANES ? l.in - i : LANES);
            top = max(top, max(a, zeros() - a));
            poison = multiply_add(0.0f, a, poison);
        }
        const float scale = std::fmax(largest(top) / 127, 1e-20f) + sum(poison);
        scales[row] = scale;
        for (int i = 0; i < l.in; i += LANES) {
            const int count = l.in - i < LANES ? l.in - i : LANES;
            const Lanes a = load_some(from + i, count) / splat(scale);
            // Adding 1.5 * 2^23 rounds to an integer, which the low bits then hold.
            Words bits = as_words(a + splat(12582912.0f));
            uint32_t lanes[LANES];
            std::memcpy(lanes, &bits, sizeof lanes);
            for (int j = 0; j < count; ++j) to[i + j] = uint8_t(lanes[j] + OFFSET);
        }
        for (int i = l.in; i % 4; ++i) to[i] = OFFSET;
    });
}

// Codes of two inputs per output become floating-point numbers; Act says which.
template <class Act>
struct Int4Weights;

template <>
struct Int4Weights<float> {
    using Act = float;
    static constexpr float ADDED = 0;  // to each code
    static int64_t panel_bytes(const kv_linear& l) { return int64_t(l.in) / 8 * PANEL * 4; }

    template <int ROWS>
    static KV_INLINE void add_pair(Tile<ROWS>& acc, int half, Words codes, Rows<float> rows, int k) {
        Ints even, odd;
        KV_PARTS even.v[p] = (IntPart)(codes.v[p] & 0xf);
        KV_PARTS odd.v[p] = (IntPart)((codes.v[p] >> 16) & 0xf);
        const Lanes w0 = as_lanes(even), w1 = as_lanes(odd);
        for (int m = 0; m < ROWS; ++m) acc[m][half] = multiply_add(rows[m][k], w0, acc[m][half]);
        for (int m = 0; m < ROWS; ++m) acc[m][half] = multiply_add(rows[m][k + 1], w1, acc[m][half]);
    }

    template <int ROWS>
    static KV_INLINE void multiply(const kv_linear& l, int panel_index, const char* w, int64_t ahead, Rows<Act> rows,
                                   Tile<ROWS>& acc);
};

#ifdef KV_HAS_BF16_DOT
template <>
struct Int4Weights<bf16> {
    using Act = bf16;
    static constexpr float ADDED = 128;  // 128 + code is a bfloat16 whose low bits are the code
    static int64_t panel_bytes(const kv_linear& l) { return Int4Weights<float>::panel_bytes(l); }

    template <int ROWS>
    static KV_INLINE void add_pair(Tile<ROWS>& acc, int half, Words codes, Rows<bf16> rows, int k) {
        KV_PARTS codes.v[p] = (codes.v[p] & 0x000f000fu) | 0x43004300u;
        for (int m = 0; m < ROWS; ++m) acc[m][half] = dot_pairs(acc[m][half], codes, load_pair(rows[m] + k));
    }

    template <int ROWS>
    static KV_INLINE void multiply(const kv_linear& l, int panel_index, const char* w, int64_t ahead, Rows<Act> rows,
                                   Tile<ROWS>& acc);
};
#endif

// For each group: acc += scale * (sum of row * (code + ADDED) - (zero + ADDED) * sum of row).
template <class Weights, int ROWS>
KV_INLINE void multiply_groups(const kv_linear& l, int panel_index, const char* w, int64_t ahead,
                               Rows<typename Weights::Act> rows, Tile<ROWS>& acc) {
    const int groups = l.in / l.group;
    for (int g = 0; g < groups; ++g) {
        Tile<ROWS> sums;
        for (int m = 0; m < ROWS; ++m) sums[m][0] = sums[m][1] = zeros();
        for (int k = g * l.group; k < (g + 1) * l.group; k += 8, w += PANEL * 4) {
            __builtin_prefetch(w + ahead);
            __builtin_prefetch(w + ahead + CACHE_LINE);
            for (int half = 0; half < 2; ++half) {
                Words codes = load_words(w + half * CACHE_LINE);
                for (int j = 0; j < 8; j += 2) {
                    Weights::template add_pair<ROWS>(sums, half, codes, rows, k + j);
                    KV_PARTS codes.v[p] >>= 4;
                }
            }
        }
        const int64_t at = (int64_t(panel_index) * groups + g) * PANEL;
        for (int half = 0; half < 2; ++half) {
            const Lanes scale = load(l.scale + at + half * LANES);
            const Lanes zero = load(l.zero + at + half * LANES) + splat(Weights::ADDED);
            for (int m = 0; m < ROWS; ++m) {
                const Lanes row_sum = splat(rows.sums[m * groups + g]);
                acc[m][half] = multiply_add(scale, sums[m][half] - zero * row_sum, acc[m][half]);
            }
        }
    }
}

template <int ROWS>
KV_INLINE void Int4Weights<float>::multiply(const kv_linear& l, int panel_index, const char* w, int64_t ahead,
                                            Rows<float> rows, Tile<ROWS>& acc) {
    multiply_groups<Int4Weights<float>, ROWS>(l, panel_index, w, ahead, rows, acc);
}
#ifdef KV_HAS_BF16_DOT
template <int ROWS>
KV_INLINE void Int4Weights<bf16>::multiply(const kv_linear& l, int panel_index, const char* w, int64_t ahead,
                                           Rows<bf16> rows, Tile<ROWS>& acc) {
    multiply_groups<Int4Weights<bf16>, ROWS>(l, panel_index, w, ahead, rows, acc);
}
#endif

// The sum of each group of each row.
template <class Act>
void sum_groups(Worker& w, const kv_linear& l, const Act* x, int64_t stride, int num_rows, float* sums) {
    const int groups = l.in / l.group;
    w.for_each(num_rows, [&](int row) {
        for (int g = 0; g < groups; ++g) {
            const Act* from = x + row * stride + g * l.group;
            Lanes total = zeros();
            for (int i = 0; i < l.group; i += LANES)
                total = total + load_some(from + i, l.group - i < LANES ? l.group - i : LANES);
            sums[int64_t(row) * groups + g] = sum(total);
        }
    });
}

// Called outside of run(), before `linear`.
inline void reserve_linear(kv_team& team, const kv_linear& l, int num_rows) {
    reserve_product(team, l, num_rows);
    if (l.format == KV_LINEAR_INT8) {
        team.buffers[kv_team::CODES].reserve(num_rows * code_stride(l));
        team.buffers[kv_team::SUMS].reserve(num_rows * sizeof(float));
    } else if (l.format == KV_LINEAR_INT4) {
        team.buffers[kv_team::SUMS].reserve(size_t(num_rows) * (l.in / l.group) * sizeof(float));
    }
}

// y = x W^T + bias for any format of weights.
template <class Act>
void linear(Worker& w, const kv_linear& l, const Act* x, int64_t stride, const Output& output, int num_rows) {
    float* sums = w.team.buffers[kv_team::SUMS].as<float>();
    if (l.format == KV_LINEAR_INT8) {
        uint8_t* codes = w.team.buffers[kv_team::CODES].as<uint8_t>();
        quantize_rows(w, l, x, stride, num_rows, codes, sums);
        multiply<Int8Weights>(w, l, {codes, code_stride(l), sums}, output, num_rows);
    } else if (l.format == KV_LINEAR_INT4) {
        sum_groups(w, l, x, stride, num_rows, sums);
        multiply<Int4Weights<Act>>(w, l, {x, stride, nullptr, sums}, output, num_rows);
    } else {
        product(w, l, x, stride, output, num_rows);
    }
}

}  // namespace KV_VARIANT
