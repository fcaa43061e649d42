// K and V of one partition of a context, turned from KV blocks into panels that products with rows can stream.
#pragma once
#include <bit>
#include <utility>

#include "api.h"
#include "float8.h"
#include "simd.h"

namespace KV_VARIANT::attention {

// Tokens that are attended to at once. Partitions begin at its multiples, so that a row's result depends on its own
// context alone.
constexpr int PARTITION = 128;
constexpr int PANEL = 2 * LANES;

// Products take words of 32 bits: one float32, or two bfloat16 whose products are added.
template <class Act>
constexpr int PER_WORD = 4 / sizeof(Act);

constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// Where the numbers of a partition's tokens lie, from the beginning of K or V. They are the same for both.
struct Tokens {
    int64_t at[PARTITION];
    int count = 0;

    void find(const kv_cache& cache, const int32_t* blocks, int head, int first, int seen) {
        count = seen - first < PARTITION ? seen - first : PARTITION;
        const int size = cache.block_size;
        int block = first / size, offset = first % size;
        for (int i = 0; i < count; ++block, offset = 0) {
            const int64_t start = (int64_t(blocks[block]) * cache.kv_heads + head) * size;
            for (; offset < size && i < count; ++offset, ++i) at[i] = (start + offset) * cache.head_dim;
        }
    }
};

#if defined(__AVX512BW__)
struct Table {
    alignas(64) uint16_t bits[128];
    constexpr Table() : bits() {
        for (uint32_t i = 0; i < 127; ++i) {
            const uint32_t word = i < 8 ? std::bit_cast<uint32_t>(float(i) * 0x1p-9f) : (i << 20) + (120u << 23);
            bits[i] = uint16_t(word >> 16);
        }
        bits[127] = 0x7fc0;
    }
};
constexpr Table E4M3;

// The bfloat16 values of e4m3 numbers, one in each 16 bits of `codes`.
KV_INLINE Words widen_codes(__m512i codes) {
    const __m512i* t = reinterpret_cast<const __m512i*>(E4M3.bits);
    const __m512i low = _mm512_permutex2var_epi16(t[0], codes, t[1]);
    const __m512i high = _mm512_permutex2var_epi16(t[2], codes, t[3]);
    const __m512i value = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40)), high);
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(codes, 8), _mm512_set1_epi16(int16_t(0x8000)));
    return Words{{(WordPart)_mm512_or_si512(value, sign)}};
}
#endif

// Sixteen words of consecutive numbers.
template <class T>
KV_INLINE Words words_of(const T* x, float) {
    return as_words(load(x));
}
template <class T>
KV_INLINE Words words_of(const T* x, bf16) {
    bf16 narrow[2 * LANES];
    store(narrow, load(x));
    store(narrow + LANES, load(x + LANES));
    return load_words(narrow);
}
KV_INLINE Words words_of(const bf16* x, bf16) { return load_words(x); }
#if defined(__AVX512BW__)
KV_INLINE Words words_of(const fp8* x, bf16) {
    __m256i bytes;
    std::memcpy(&bytes, x, sizeof bytes);
    return widen_codes(_mm512_cvtepu8_epi16(bytes));
}
#endif

// Sixteen words of numbers of one token, or of two tokens in turns.
template <class T>
KV_INLINE Words words_of(const T* x, const T*, float) {
    return as_words(load(x));
}
template <class T>
KV_INLINE Lanes load_rounded(const T* x) {
    return load(x);
}
KV_INLINE Lanes load_rounded(const float* x) {
    bf16 narrow[LANES];
    store(narrow, load(x));
    return load(narrow);
}
template <class T>
KV_INLINE Words words_of(const T* x, const T* y, bf16) {
    Words low = as_words(load_rounded(x));
    const Words high = as_words(load_rounded(y));
    KV_PARTS low.v[p] = low.v[p] >> 16 | high.v[p];
    return low;
}
#if defined(__AVX512BW__)
KV_INLINE Words words_of(const fp8* x, const fp8* y, bf16) {
    const __m512i low = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    const __m512i high = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(y)));
    return widen_codes(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
#endif

template <int STEP, size_t... I>
KV_INLINE void swap_step(WordPart& a, WordPart& b, std::index_sequence<I...>) {
    constexpr int N = PART_LANES;
    const WordPart low = __builtin_shufflevector(a, b, (I & STEP ? N + I - STEP : I)...);
    b = __builtin_shufflevector(a, b, (I & STEP ? N + I : I + STEP)...);
    a = low;
}
template <int STEP>
KV_INLINE void swap_steps(WordPart (&square)[PART_LANES]) {
    if constexpr (STEP < PART_LANES) {
        for (int i = 0; i < PART_LANES; ++i)
            if (!(i & STEP))
                swap_step<STEP>(square[i], square[i + STEP], std::make_index_sequence<PART_LANES>{});
        swap_steps<STEP * 2>(square);
    }
}

// Sixteen tokens' words become sixteen words' tokens, at a distance of `stride` words.
KV_INLINE void store_transposed(const Words (&rows)[LANES], uint32_t* out, int stride) {
    for (int i = 0; i < PARTS; ++i)
        for (int j = 0; j < PARTS; ++j) {
            WordPart square[PART_LANES];
            for (int k = 0; k < PART_LANES; ++k) square[k] = rows[i * PART_LANES + k].v[j];
            swap_steps<1>(square);
            for (int k = 0; k < PART_LANES; ++k)
                *(WordPart*)(out + (j * PART_LANES + k) * stride + i * PART_LANES) = square[k];
        }
}

// Memory that will be read soon: the numbers of sixteen tokens from `first` on.
template <class T>
KV_INLINE void prefetch(const T* plane, const Tokens& tokens, int first, int dim) {
    for (int i = first; i < first + LANES && i < tokens.count; ++i)
        for (size_t byte = 0; byte < dim * sizeof(T); byte += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(plane + tokens.at[i]) + byte, 0, 2);
}

// The first `count` numbers of sixteen words, zeros behind them.
template <class T>
struct Padded {
    T numbers[2 * LANES] = {};
    Padded(const T* x, int count) { std::memcpy(numbers, x, count * sizeof(T)); }
};

// keys: [ceil(tokens / 32)][words of a head, rounded up to 16][32]. Tokens past the end are zero.
template <class Act, class T>
void pack_keys(const T* k, const Tokens& tokens, int dim, const T* v, uint32_t* keys) {
    constexpr int STEP = LANES * PER_WORD<Act>;
    const int words = round_up(dim, STEP) / PER_WORD<Act>;
    for (int first = 0; first < tokens.count; first += LANES) {
        prefetch(v, tokens, first, dim);
        uint32_t* out = keys + first / PANEL * PANEL * words + first % PANEL;
        for (int d = 0; d < dim; d += STEP, out += LANES * PANEL) {
            Words rows[LANES];
            const bool is_whole = d + STEP <= dim && first + LANES <= tokens.count;
            if (is_whole)
                for (int i = 0; i < LANES; ++i) rows[i] = words_of(k + tokens.at[first + i] + d, Act{});
            else
                for (int i = 0; i < LANES; ++i) {
                    const int count = first + i >= tokens.count ? 0 : dim - d < STEP ? dim - d : STEP;
                    const Padded<T> padded(count ? k + tokens.at[first + i] + d : k, count);
                    rows[i] = words_of(padded.numbers, Act{});
                }
            store_transposed(rows, out, PANEL);
        }
    }
    if (tokens.count % PANEL > 0 && tokens.count % PANEL <= LANES) {
        uint32_t* out = keys + tokens.count / PANEL * PANEL * words + LANES;
        for (int i = 0; i < words; ++i) store(reinterpret_cast<float*>(out + i * PANEL), zeros());
    }
}

// values: [ceil(dim / 32)][words of a partition's tokens][32]. Numbers past `dim` and tokens past the end are zero.
template <class Act, class T>
void pack_values(const T* v, const Tokens& tokens, int dim, const T* next_k, const Tokens& next, uint32_t* values) {
    constexpr int UNIT = PER_WORD<Act>;
    const int whole = tokens.count / UNIT * UNIT;
    for (int t = 0; t < tokens.count; t += LANES) prefetch(next_k, next, t, dim);
    for (int d = 0; d < dim; d += PANEL, values += PARTITION / UNIT * PANEL) {
        float* out = reinterpret_cast<float*>(values);
        if (d + PANEL <= dim)
            for (int t = 0; t < whole; t += UNIT, out += PANEL) {
                const T *x = v + tokens.at[t] + d, *y = v + tokens.at[t + UNIT - 1] + d;
                store(out, as_floats(words_of(x, y, Act{})));
                store(out + LANES, as_floats(words_of(x + LANES, y + LANES, Act{})));
            }
        for (int t = d + PANEL <= dim ? whole : 0; t < tokens.count; t += UNIT, out += PANEL) {
            const int count = dim - d < PANEL ? dim - d : PANEL;
            const bool has_second = t + UNIT <= tokens.count;
            const Padded<T> x(v + tokens.at[t] + d, count);
            const Padded<T> y(has_second ? v + tokens.at[t + UNIT - 1] + d : v, has_second ? count : 0);
            store(out, as_floats(words_of(x.numbers, y.numbers, Act{})));
            store(out + LANES, as_floats(words_of(x.numbers + LANES, y.numbers + LANES, Act{})));
        }
    }
}

}  // namespace KV_VARIANT::attention
