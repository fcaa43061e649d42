// Sixteen lanes of int32, and sums of products of small integers.
#pragma once
#include "simd.h"

namespace KV_VARIANT {

struct Ints {
    IntPart v[PARTS];
};

KV_INLINE Lanes as_lanes(Ints a) {
    Lanes r;
    KV_PARTS r.v[p] = __builtin_convertvector(a.v[p], FloatPart);
    return r;
}

// Rows are stored as code + OFFSET: AVX-512 and tiles multiply unsigned rows by signed weights.
#if defined(__AVX512VNNI__) || defined(KV_HAS_TILES)
constexpr int OFFSET = 128;
#else
constexpr int OFFSET = 0;
#endif

// sum += a for sums that a loop keeps in registers.
KV_INLINE void add_to(IntPart& sum, IntPart a) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(a));  // gcc would add in another order, which takes too many registers
#else
    sum += a;
#endif
}

// acc[i] += the sum of four products: of row codes in `row`, and of weight codes in lane i of `weights`.
KV_INLINE Ints dot_four(Ints acc, Words weights, uint32_t row) {
#if defined(__AVX512VNNI__)
    acc.v[0] = (IntPart)_mm512_dpbusd_epi32((__m512i)acc.v[0], _mm512_set1_epi32((int)row), (__m512i)weights.v[0]);
#elif defined(__AVX2__)
    const __m256i rows = _mm256_set1_epi32((int)row), ones = _mm256_set1_epi16(1);
    KV_PARTS {
        // |weight| * (row with the weight's sign): the sum of two products fits 16 bits, because codes are at most 127.
        const __m256i w = (__m256i)weights.v[p];
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(rows, w));
        add_to(acc.v[p], (IntPart)_mm256_madd_epi16(pairs, ones));
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

#if (defined(__AVX2__) && !defined(KV_HAS_BF16_DOT)) || defined(KV_HAS_TILES)
#define KV_HAS_INT16_DOT 1
// acc[i] += pairs[2i] * pair[0] + pairs[2i + 1] * pair[1]. `pair` is two int16, `pairs` sixteen times two.
KV_INLINE Ints dot_pairs(Ints acc, Words pairs, uint32_t pair) {
#if defined(__AVX512VNNI__)
    acc.v[0] = (IntPart)_mm512_dpwssd_epi32((__m512i)acc.v[0], (__m512i)pairs.v[0], _mm512_set1_epi32((int)pair));
#elif defined(KV_EMULATES_TILES)
    const IntPart x = IntPart{} + int16_t(pair), y = IntPart{} + int16_t(pair >> 16);
    KV_PARTS acc.v[p] += ((IntPart)(pairs.v[p] << 16) >> 16) * x + ((IntPart)pairs.v[p] >> 16) * y;
#else
    KV_PARTS add_to(acc.v[p], (IntPart)_mm256_madd_epi16((__m256i)pairs.v[p], _mm256_set1_epi32((int)pair)));
#endif
    return acc;
}
#endif

}  // namespace KV_VARIANT
