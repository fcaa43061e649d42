// The numbers that codes of 4 bits mean: int4 and MXFP4 (e2m1).
#pragma once
#include "ints.h"
#include "linear_tiles.h"

namespace KV_VARIANT {

// Turns int4 codes of two inputs at a time into numbers that rows multiply, for three types of rows. A number is its code plus
// ADDED. `Sums` add up the products of at most MOST_SUMMED inputs: sums of more would be rounded too often.
template <class Act>
struct Int4Weights;

// Rows of float32. `Codes::number` is the number of a code.
template <class Codes>
struct FloatNumbers {
    using Act = float;
    using Sums = Lanes;

    template <int ROWS, int COUNT>
    static KV_INLINE void add_pair(Tile<ROWS, COUNT>& sums, int h, Words codes, int shift, Rows<float> rows, int k) {
        const Lanes w0 = Codes::number(codes, shift), w1 = Codes::number(codes, shift + 16);
        for (int m = 0; m < ROWS; ++m) sums[m][h] = multiply_add(rows[m][k], w0, sums[m][h]);
        for (int m = 0; m < ROWS; ++m) sums[m][h] = multiply_add(rows[m][k + 1], w1, sums[m][h]);
    }
    // Writes the numbers of a pair of inputs of 16 outputs for `add_expanded_pair`, which moves `halves` to the next pair.
    static KV_INLINE void expand(Words codes, int shift, char* pair, int half) {
        float* out = reinterpret_cast<float*>(pair) + half * LANES;
        store(out, Codes::number(codes, shift));
        store(out + PANEL, Codes::number(codes, shift + 16));
    }
    static constexpr int EXPANDED_PAIR_BYTES = 2 * PANEL * 4;
    template <int ROWS, int COUNT>
    static KV_INLINE void add_expanded_pair(Tile<ROWS, COUNT>& sums, Halves& halves, Rows<float> rows, int k) {
        for (int i = 0; i < 2; ++i, halves.advance()) {
            Lanes w[COUNT];
            for (int h = 0; h < COUNT; ++h) w[h] = load(reinterpret_cast<const float*>(halves[h]));
            add_outer<ROWS>(rows, k + i, w, sums);
        }
    }
};

template <>
struct Int4Weights<float> : FloatNumbers<Int4Weights<float>> {
    static constexpr bool HAS_ZEROS = true;
    static constexpr float ADDED = 0;
    static constexpr int MOST_SUMMED = 1024;

    static KV_INLINE Lanes number(Words codes, int shift) {
        Ints number;
        KV_PARTS number.v[p] = (IntPart)((codes.v[p] >> shift) & 0xf);
        return as_lanes(number);
    }
};

// Rows whose pairs the processor multiplies at once.
template <class Codes, class T>
struct PairedNumbers {
    using Act = T;
    static constexpr int EXPANDED_PAIR_BYTES = PANEL * 4;

    template <int ROWS, int COUNT, class Sums>
    static KV_INLINE void add_pair(Sums (&sums)[ROWS][COUNT], int h, Words codes, int shift, Rows<Act> rows, int k) {
        const Words w = Codes::number(codes, shift);
        for (int m = 0; m < ROWS; ++m) sums[m][h] = dot_pairs(sums[m][h], w, load_pair(rows[m] + k));
    }
    static KV_INLINE void expand(Words codes, int shift, char* pair, int half) {
        const Words w = Codes::number(codes, shift);
        std::memcpy(pair + half * CACHE_LINE, &w, CACHE_LINE);
    }
    template <int ROWS, int COUNT, class Sums>
    static KV_INLINE void add_expanded_pair(Sums (&sums)[ROWS][COUNT], Halves& halves, Rows<Act> rows, int k) {
        Words w[COUNT];
        for (int h = 0; h < COUNT; ++h) w[h] = load_words(halves[h]);
        for (int m = 0; m < ROWS; ++m) {
            const uint32_t x = load_pair(rows[m] + k);
            for (int h = 0; h < COUNT; ++h) sums[m][h] = dot_pairs(sums[m][h], w[h], x);
        }
        halves.advance();
    }
};

#ifdef KV_HAS_BF16_DOT
template <>
struct Int4Weights<bf16> : PairedNumbers<Int4Weights<bf16>, bf16> {
    using Sums = Lanes;
    static constexpr bool HAS_ZEROS = true;
    static constexpr float ADDED = 128;  // 128 + code is a bfloat16 whose low bits are the code
    // ADDED makes sums up to 100 times as large as those of codes minus zero points, and their rounding errors with them. Intel's
    // processors round after each product, of equal inputs always in the same direction. A product of two bfloat16 numbers has
    // 16 significant bits, so that float32 holds the sum of 256 products of one size exactly.
    static constexpr int MOST_SUMMED = 256;

    static KV_INLINE Words number(Words codes, int shift) {
        KV_PARTS codes.v[p] = ((codes.v[p] >> shift) & 0x000f000fu) | 0x43004300u;
        return codes;
    }
};
#endif

#ifdef KV_HAS_INT16_DOT
// Half as many instructions for a weight as with float32 rows.
template <>
struct Int4Weights<int16_t> : PairedNumbers<Int4Weights<int16_t>, int16_t> {
    using Sums = Ints;
    static constexpr bool HAS_ZEROS = true;
    static constexpr float ADDED = 0;
    static constexpr int MOST_SUMMED = INT32_MAX;  // whole numbers are not rounded

    static KV_INLINE Words number(Words codes, int shift) {
        KV_PARTS codes.v[p] = (codes.v[p] >> shift) & 0x000f000fu;
        return codes;
    }
};
#endif

// Codes in e2m1: a sign, and 0, 0.5, 1, 1.5, 2, 3, 4 or 6.
template <class Act>
struct Fp4Weights;

template <>
struct Fp4Weights<float> : FloatNumbers<Fp4Weights<float>> {
    static constexpr bool HAS_ZEROS = false;
    static constexpr int MOST_SUMMED = 1024;

    static KV_INLINE Lanes number(Words codes, int shift) {
        Lanes r;
#if defined(__AVX512F__)
        const __m512 numbers = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
        r.v[0] = (FloatPart)_mm512_permutexvar_ps((__m512i)(codes.v[0] >> shift), numbers);  // takes the lowest four bits
#elif defined(__AVX2__)
        const __m256 numbers = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
        KV_PARTS {
            const WordPart code = codes.v[p] >> shift;
            const __m256 magnitude = _mm256_permutevar8x32_ps(numbers, (__m256i)code);  // takes the lowest three bits
            r.v[p] = (FloatPart)((WordPart)magnitude | (code >> 3 << 31));
        }
#else
        KV_PARTS {
            const WordPart code = codes.v[p] >> shift;
            const WordPart twice = ((WordPart{} + 0xc8643210u) >> ((code & 7) << 2)) & 15;
            const FloatPart magnitude = __builtin_convertvector((IntPart)twice, FloatPart) * 0.5f;
            r.v[p] = (FloatPart)((WordPart)magnitude | (code >> 3 << 31));
        }
#endif
        return r;
    }
};

#ifdef KV_HAS_BF16_DOT
template <>
struct Fp4Weights<bf16> : PairedNumbers<Fp4Weights<bf16>, bf16> {
    using Sums = Lanes;
    static constexpr bool HAS_ZEROS = false;
    static constexpr int MOST_SUMMED = 1024;

    static KV_INLINE Words number(Words codes, int shift) {
#if defined(__AVX512BW__)
        alignas(64) static const uint16_t numbers[32] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                         0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
        const __m512i indices = (__m512i)((codes.v[0] >> shift) & 0x000f000fu);
        codes.v[0] = (WordPart)_mm512_permutexvar_epi16(indices, _mm512_load_si512(numbers));
        return codes;
#else
        const Words even = as_words(Fp4Weights<float>::number(codes, shift));
        const Words odd = as_words(Fp4Weights<float>::number(codes, shift + 16));
        KV_PARTS codes.v[p] = even.v[p] >> 16 | (odd.v[p] & 0xffff0000u);
        return codes;
#endif
    }
};
#endif

}  // namespace KV_VARIANT
