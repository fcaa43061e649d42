// e4m3 numbers: sign, 4 bits of exponent with bias 7, 3 bits of mantissa. 0x7f is not-a-number; there are no infinities.
#pragma once
#include "simd.h"

namespace KV_VARIANT {

struct fp8 {
    uint8_t bits;
};

typedef uint8_t BytePart __attribute__((vector_size(PART_LANES), aligned(1), may_alias));

#if defined(__AVX2__) && !defined(__AVX512F__)
// Shifted left by 7 bits a code is a float16 number with the same sign, exponent and mantissa: 2^-8 of its value.
KV_INLINE Lanes load(const fp8* x) {
    __m128i bytes;
    std::memcpy(&bytes, x, sizeof bytes);
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(int16_t(0xbf80)));
    const __m256i magnitude = _mm256_and_si256(shifted, _mm256_set1_epi16(0x3f80));
    const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80));
    const __m256i exponents_top = _mm256_and_si256(is_nan, _mm256_set1_epi16(0x4000));  // makes that float16 not-a-number
    const __m256i numbers = _mm256_or_si256(halves, exponents_top);
    Lanes r;
    r.v[0] = (FloatPart)_mm256_cvtph_ps(_mm256_castsi256_si128(numbers)) * 256.0f;
    r.v[1] = (FloatPart)_mm256_cvtph_ps(_mm256_extracti128_si256(numbers, 1)) * 256.0f;
    return r;
}
#else
KV_INLINE Lanes load(const fp8* x) {
    Lanes r;
    KV_PARTS {
        const WordPart bits = __builtin_convertvector(*(const BytePart*)(x + p * PART_LANES), WordPart);
        const WordPart magnitude = bits & 0x7f;
        const FloatPart small = __builtin_convertvector(magnitude, FloatPart) * 0x1p-9f;
        FloatPart value = (FloatPart)((magnitude << 20) + (120u << 23));
        value = magnitude < 8 ? small : value;
        const FloatPart nan = splat_part(__builtin_nanf(""));
        value = magnitude == 0x7f ? nan : value;
        r.v[p] = (FloatPart)((WordPart)value | (bits & 0x80) << 24);
    }
    return r;
}
#endif

// Rounds to nearest even; numbers beyond 448 become 448; not-a-number stays not-a-number.
KV_INLINE void store(fp8* x, Lanes a) {
    KV_PARTS {
        const WordPart bits = (WordPart)a.v[p], sign = bits & 0x80000000u;
        const FloatPart magnitude = (FloatPart)(bits ^ sign), largest = splat_part(448.0f);
        const FloatPart clamped = magnitude > largest ? largest : magnitude;
        WordPart word = (WordPart)clamped;
        // Adding 2^14 leaves a count of 2^-9, the smallest number, in the low bits.
        const WordPart small = (WordPart)(clamped + 0x1p14f) - (141u << 23);
        const WordPart normal = (word - (120u << 23) + 0x7ffff + ((word >> 20) & 1)) >> 20;
        WordPart narrow = word < (121u << 23) ? small : normal;
        narrow = word > 0x7f800000u ? WordPart{} + 0x7f : narrow;
        *(BytePart*)(x + p * PART_LANES) = __builtin_convertvector(narrow | sign >> 24, BytePart);
    }
}

}  // namespace KV_VARIANT
