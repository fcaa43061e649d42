// Sixteen lanes of float32 on every instruction set, and conversions.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define KV_INLINE inline __attribute__((always_inline))

namespace KV_VARIANT {

struct bf16 {
    uint16_t bits;
};

// Keeps loads after this point where they are: clang would hoist more of them than registers hold. gcc gets no barrier, which
// would make it move sums into memory.
KV_INLINE void keep_loads_here() {
#if defined(__clang__)
    asm volatile("" ::: "memory");
#endif
}

constexpr int LANES = 16;
#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif
constexpr int PARTS = 64 / VECTOR_BYTES;
constexpr int PART_LANES = LANES / PARTS;

typedef float FloatPart __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint32_t WordPart __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t IntPart __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint16_t HalfPart __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));

// A loop over the native vectors that make up sixteen lanes; compilers unroll it.
#define KV_PARTS for (int p = 0; p < PARTS; ++p)

struct Words {
    WordPart v[PARTS];
};

struct Lanes {
    FloatPart v[PARTS];
};

// Compilers drop the subtraction of 0 from x. They would keep 0 + x, which turns -0 into 0: one addition for each multiply-add.
KV_INLINE FloatPart splat_part(float x) { return x - FloatPart{}; }
KV_INLINE Lanes splat(float x) {
    Lanes r;
    KV_PARTS r.v[p] = splat_part(x);
    return r;
}
KV_INLINE Lanes zeros() { return splat(0.0f); }
KV_INLINE Lanes operator+(Lanes a, Lanes b) {
    KV_PARTS a.v[p] += b.v[p];
    return a;
}
KV_INLINE Lanes operator-(Lanes a, Lanes b) {
    KV_PARTS a.v[p] -= b.v[p];
    return a;
}
KV_INLINE Lanes operator*(Lanes a, Lanes b) {
    KV_PARTS a.v[p] *= b.v[p];
    return a;
}
KV_INLINE Lanes operator/(Lanes a, Lanes b) {
    KV_PARTS a.v[p] /= b.v[p];
    return a;
}
KV_INLINE Lanes max(Lanes a, Lanes b) {
    KV_PARTS a.v[p] = a.v[p] > b.v[p] ? a.v[p] : b.v[p];
    return a;
}
KV_INLINE Lanes min(Lanes a, Lanes b) {
    KV_PARTS a.v[p] = a.v[p] < b.v[p] ? a.v[p] : b.v[p];
    return a;
}
// a * b + c, in one rounding where the processor can. The compiler must not fuse others (-ffp-contract=off): it may fuse one
// copy of the same code and not another, so that the last bit of a row's result would differ.
KV_INLINE FloatPart fused(FloatPart a, FloatPart b, FloatPart c) {
#if defined(__AVX512F__)
    return (FloatPart)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (FloatPart)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (FloatPart)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
KV_INLINE Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
    KV_PARTS c.v[p] = fused(a.v[p], b.v[p], c.v[p]);
    return c;
}
// a * b + c for sums c that a loop keeps in registers.
KV_INLINE Lanes multiply_add(float a, Lanes b, Lanes c) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
    // gcc would overwrite an operand other than the sum, so that sums move between registers, and some through memory.
    KV_PARTS {
        FloatPart sum = c.v[p];
        asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(splat_part(a)), "x"(b.v[p]));
        c.v[p] = sum;
    }
#else
    KV_PARTS c.v[p] = fused(splat_part(a), b.v[p], c.v[p]);
#endif
    return c;
}
KV_INLINE Lanes as_floats(Words a) {
    Lanes r;
    KV_PARTS r.v[p] = (FloatPart)a.v[p];
    return r;
}
KV_INLINE Words as_words(Lanes a) {
    Words r;
    KV_PARTS r.v[p] = (WordPart)a.v[p];
    return r;
}

KV_INLINE Lanes load(const float* x) {
    Lanes r;
    KV_PARTS r.v[p] = *(const FloatPart*)(x + p * PART_LANES);
    return r;
}
KV_INLINE Words load_words(const void* x) {
    Words r;
    KV_PARTS r.v[p] = *((const WordPart*)x + p);
    return r;
}
KV_INLINE Lanes load(const bf16* x) {
    Lanes r;
    KV_PARTS r.v[p] = (FloatPart)(__builtin_convertvector(*(const HalfPart*)(x + p * PART_LANES), WordPart) << 16);
    return r;
}
KV_INLINE void store(float* x, Lanes a) { KV_PARTS *(FloatPart*)(x + p * PART_LANES) = a.v[p]; }
// Rounds to nearest even; not-a-number stays not-a-number.
KV_INLINE void store(bf16* x, Lanes a) {
#if defined(__AVX512BF16__)
    __m256bh narrow = _mm512_cvtneps_pbh((__m512)a.v[0]);
    std::memcpy(x, &narrow, sizeof narrow);
#else
    KV_PARTS {
        WordPart bits = (WordPart)a.v[p];
        WordPart rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        WordPart is_nan = (WordPart)(a.v[p] != a.v[p]);
        rounded = (rounded & ~is_nan) | (((bits >> 16) | 0x40) & is_nan);
        *(HalfPart*)(x + p * PART_LANES) = __builtin_convertvector(rounded, HalfPart);
    }
#endif
}

// The first `count` of sixteen lanes. The others are zero; their memory is not read.
template <class T>
KV_INLINE Lanes load_some(const T* x, int count) {
    T whole[LANES] = {};
    std::memcpy(whole, x, count * sizeof(T));
    return load(whole);
}
template <class T>
KV_INLINE void store_some(T* x, Lanes a, int count) {
    T whole[LANES];
    store(whole, a);
    std::memcpy(x, whole, count * sizeof(T));
}
template <class T>
KV_INLINE Lanes read(const T* x, int count) {
    return count == LANES ? load(x) : load_some(x, count);
}
template <class T>
KV_INLINE void write(T* x, Lanes a, int count) {
    count == LANES ? store(x, a) : store_some(x, a, count);
}

// f(first, count) for each run of up to sixteen of n numbers.
template <class F>
KV_INLINE void for_lanes(int n, const F& f) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) f(i, LANES);
    if (i < n) f(i, n - i);
}
template <class In, class Out>
KV_INLINE void copy(const In* x, int n, Out* out) {
    for_lanes(n, [&](int i, int count) { write(out + i, read(x + i, count), count); });
}

alignas(64) constexpr uint32_t LANE_NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

KV_INLINE float sum(Lanes a) {
    float lanes[LANES], total = 0;
    store(lanes, a);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return total + lanes[0];
}
KV_INLINE float largest(Lanes a) {
    float lanes[LANES];
    store(lanes, a);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

// e^x to within 2 units in the last place; 0 below -87, infinity above 88.
KV_INLINE Lanes exp(Lanes x) {
    const Lanes magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer in the low bits
    Lanes r;
    KV_PARTS {
        FloatPart a = x.v[p];
        FloatPart low = splat_part(-87.3f), high = splat_part(88.7f);
        FloatPart b = a < low ? low : a;
        b = b > high ? high : b;
        const auto c = splat_part;
        FloatPart n = fused(b, c(1.44269504f), magic.v[p]);
        WordPart exponent = (WordPart)n << 23;
        n -= magic.v[p];
        b = fused(n, c(-0.693145752f), b);
        b = fused(n, c(-1.42860677e-6f), b);
        FloatPart y = fused(b, c(1.98756915e-4f), c(1.39819995e-3f));
        y = fused(y, b, c(8.33345192e-3f));
        y = fused(y, b, c(4.16657962e-2f));
        y = fused(y, b, c(1.66666655e-1f));
        y = fused(y, b, c(0.5f));
        y = fused(y, b * b, b + 1.0f);
        // Not a product with 2^n, because 2^128 alone is infinite.
        FloatPart scaled = (FloatPart)((WordPart)y + exponent);
        FloatPart result = a < low ? FloatPart{} : scaled;
        FloatPart infinite = splat_part(__builtin_inff());
        result = a > high ? infinite : result;
        r.v[p] = a != a ? a : result;
    }
    return r;
}

KV_INLINE Lanes silu(Lanes x) { return x / (splat(1.0f) + exp(zeros() - x)); }

// Matrix products take activations of bfloat16 if the processor multiplies pairs of them.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(KV_EMULATES_TILES)
#define KV_HAS_BF16_DOT 1
// acc + the products of sixteen pairs with sixteen others.
KV_INLINE Lanes dot_words(Lanes acc, Words a, Words b) {
#if defined(__AVX512BF16__)
    acc.v[0] = (FloatPart)_mm512_dpbf16_ps((__m512)acc.v[0], (__m512bh)(__m512i)a.v[0], (__m512bh)(__m512i)b.v[0]);
#elif defined(KV_EMULATES_TILES)
    KV_PARTS {
        acc.v[p] = fused((FloatPart)(a.v[p] << 16), (FloatPart)(b.v[p] << 16), acc.v[p]);
        acc.v[p] = fused((FloatPart)(a.v[p] & 0xffff0000u), (FloatPart)(b.v[p] & 0xffff0000u), acc.v[p]);
    }
#else
    KV_PARTS acc.v[p] = (FloatPart)vbfdotq_f32((float32x4_t)acc.v[p], (bfloat16x8_t)a.v[p], (bfloat16x8_t)b.v[p]);
#endif
    return acc;
}
// acc[i] += pairs[2i] * pair[0] + pairs[2i + 1] * pair[1]. `pair` is two bfloat16, `pairs` sixteen times two.
KV_INLINE Lanes dot_pairs(Lanes acc, Words pairs, uint32_t pair) {
    Words both;
    KV_PARTS both.v[p] = WordPart{} + pair;
    return dot_words(acc, pairs, both);
}
#endif

template <class T>
KV_INLINE uint32_t load_pair(const T* x) {
    static_assert(sizeof(T) == 2);
    uint32_t r;
    std::memcpy(&r, x, 4);
    return r;
}

}  // namespace KV_VARIANT
