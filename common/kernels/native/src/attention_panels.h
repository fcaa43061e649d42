// K and V of one partition of a context, turned from KV blocks into panels that products with rows can stream.
#pragma once
#include <algorithm>
#include <bit>
#include <type_traits>
#include <utility>

#include "float8.h"
#include "linear_tiles.h"

namespace KV_VARIANT::attention {

// Tokens that are attended to at once. Partitions begin at its multiples, so that a row's result depends on its own
// context alone.
constexpr int PARTITION = 128;

// Panels consist of words of 32 bits: one float32, or two bfloat16.
template <class Number>
constexpr int PER_WORD = 4 / sizeof(Number);

// The type in panels of a cache's numbers of type T. For activations in float32, numbers of 16 or 8 bits become bfloat16 on
// AVX-512 only: on AVX2 each tile of six rows would repeat the conversion, and prompts take a fifth longer.
template <class Act, class T>
using InPanel = std::conditional_t<sizeof(Act) == 4 && (sizeof(T) == 4 || VECTOR_BYTES < 64), float, bf16>;

constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// The places of a partition's tokens, counted in numbers from the beginning of K or V; the same for both.
struct Tokens {
    int64_t at[PARTITION];
    int begin = 0, count = 0;  // Tokens before `begin` are in no row's window: they are not read, and zero in panels.

    void find(const kv_cache& cache, const int32_t* blocks, int head, int first, int seen_from, int seen) {
        count = std::min(seen - first, PARTITION);
        begin = std::max(seen_from - first, 0);
        const int size = cache.block_size;
        int block = (first + begin) / size, offset = (first + begin) % size;
        for (int i = begin; i < count; ++block, offset = 0) {
            const int64_t start = ((int64_t(blocks[block]) * cache.kv_heads + head) * size + offset) * cache.head_dim;
            const int end = std::min(count, i + size - offset);
            for (int token = 0; i < end; ++token, ++i) at[i] = start + token * cache.head_dim;
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

// Pairs of the numbers of two tokens: 32 numbers of each become two vectors.
template <class T>
KV_INLINE void pair_words(const T* x, const T* y, Words (&pairs)[2]) {
    const Words a = words_of(x, bf16{}), b = words_of(y, bf16{});
#if defined(__AVX512BW__)
    static constexpr auto IN_TURNS = [] {
        struct {
            alignas(64) uint16_t from[4 * LANES];
        } r{};
        for (int i = 0; i < 4 * LANES; ++i) r.from[i] = uint16_t(i / 2 + i % 2 * 2 * LANES);
        return r;
    }();
    for (int half = 0; half < 2; ++half) {
        const __m512i from = _mm512_load_si512(IN_TURNS.from + half * 2 * LANES);
        pairs[half].v[0] = (WordPart)_mm512_permutex2var_epi16((__m512i)a.v[0], from, (__m512i)b.v[0]);
    }
#else
    uint16_t first[2 * LANES], second[2 * LANES], both[4 * LANES];
    std::memcpy(first, &a, sizeof a);
    std::memcpy(second, &b, sizeof b);
    for (int i = 0; i < 2 * LANES; ++i) both[2 * i] = first[i], both[2 * i + 1] = second[i];
    std::memcpy(pairs, both, sizeof both);
#endif
}

// A panel's 32 words of one token's numbers, or of two tokens' numbers interleaved.
template <class T>
KV_INLINE void store_words(const T* x, const T*, uint32_t* out, float) {
    store(reinterpret_cast<float*>(out), load(x));
    store(reinterpret_cast<float*>(out) + LANES, load(x + LANES));
}
template <class T>
KV_INLINE void store_words(const T* x, const T* y, uint32_t* out, bf16) {
    Words pairs[2];
    pair_words(x, y, pairs);
    std::memcpy(out, pairs, sizeof pairs);
}

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

// Transposes 16 x 16 words: row i of `out`, `stride` words after the one before, gets word i of each token.
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

// Fetches a partition's K, V or both into the cache, some tokens at a time between other work, because the memory serves only a
// few requests at once.
struct Ahead {
    const Tokens& tokens;
    const char* planes[2];  // either may be null
    int row_bytes, number_bytes;
    int tokens_per_call;
    int next = tokens.begin;

    KV_INLINE void fetch() {
        const int end = std::min(next + tokens_per_call, tokens.count);
        for (; next < end; ++next)
            for (const char* plane : planes)
                for (int byte = 0; plane && byte < row_bytes; byte += 64)
                    __builtin_prefetch(plane + tokens.at[next] * number_bytes + byte, 0, NEAR);
    }
};

// The first `count` of 32 numbers, with zeros behind them.
template <class T>
struct Padded {
    T numbers[2 * LANES] = {};
    Padded(const T* x, int count) { std::memcpy(numbers, x, count * sizeof(T)); }
};

// keys: [ceil(tokens / 32)][words of a head, rounded up to 16][32]. Tokens past the end are zero, and those before
// `tokens.begin` in the panel where it is; panels before that one are not written.
template <class Number, class T>
void pack_keys(const T* k, const Tokens& tokens, int dim, Ahead& ahead, uint32_t* keys) {
    constexpr int STEP = LANES * PER_WORD<Number>;
    const int words = round_up(dim, STEP) / PER_WORD<Number>;
    for (int first = tokens.begin / PANEL * PANEL; first < tokens.count; first += LANES) {
        ahead.fetch();
        uint32_t* out = keys + first / PANEL * PANEL * words + first % PANEL;
        for (int d = 0; d < dim; d += STEP, out += LANES * PANEL) {
            Words rows[LANES];
            const int begin = std::clamp(tokens.begin - first, 0, LANES), count = std::min(LANES, tokens.count - first);
            for (int i = 0; i < begin; ++i) rows[i] = as_words(zeros());
            for (int i = count; i < LANES; ++i) rows[i] = as_words(zeros());
            if (d + STEP > dim)
                for (int i = begin; i < count; ++i)
                    rows[i] = words_of(Padded<T>(k + tokens.at[first + i] + d, dim - d).numbers, Number{});
            else if (count - begin < LANES)
                for (int i = begin; i < count; ++i) rows[i] = words_of(k + tokens.at[first + i] + d, Number{});
            else
                for (int i = 0; i < LANES; ++i) rows[i] = words_of(k + tokens.at[first + i] + d, Number{});
            store_transposed(rows, out, PANEL);
        }
    }
    if (tokens.count % PANEL > 0 && tokens.count % PANEL <= LANES) {
        uint32_t* out = keys + tokens.count / PANEL * PANEL * words + LANES;
        for (int i = 0; i < words; ++i) store(reinterpret_cast<float*>(out + i * PANEL), zeros());
    }
}

// values: [ceil(dim / 32)][words of a partition's tokens][32]. Numbers past `dim` and tokens past the end are zero, and
// those before `tokens.begin` in the panel where it is; words before that panel's are not written.
template <class Number, class T>
void pack_values(const T* v, const Tokens& tokens, int dim, Ahead& ahead, uint32_t* values) {
    constexpr int UNIT = PER_WORD<Number>;
    const int begin = tokens.begin / PANEL * PANEL, first = round_up(tokens.begin, UNIT), whole = tokens.count / UNIT * UNIT;
    for (int d = 0; d < dim; d += PANEL, values += PARTITION / UNIT * PANEL) {
        const bool is_full = d + PANEL <= dim;
        const int count = is_full ? PANEL : dim - d;
        const auto store_padded = [&](int t) {
            const bool has_first = t >= tokens.begin, has_second = t + UNIT <= tokens.count;
            const Padded<T> x(has_first ? v + tokens.at[t] + d : v, has_first ? count : 0);
            const Padded<T> y(has_second ? v + tokens.at[t + UNIT - 1] + d : v, has_second ? count : 0);
            store_words(x.numbers, y.numbers, values + t / UNIT * PANEL, Number{});
        };
        int t = begin;
        for (; t + UNIT <= tokens.begin; t += UNIT) std::memset(values + t / UNIT * PANEL, 0, PANEL * sizeof *values);
        for (; t < first; t += UNIT) store_padded(t);
        if (is_full)
            for (; t < whole; t += UNIT) {
                if (t % PANEL == 0) ahead.fetch();
                const T *x = v + tokens.at[t] + d, *y = v + tokens.at[t + UNIT - 1] + d;
                store_words(x, y, values + t / UNIT * PANEL, Number{});
            }
        for (; t < tokens.count; t += UNIT) store_padded(t);
#ifdef KV_HAS_TILES
        // Matrix units take 32 tokens at a time.
        for (; t % PANEL; t += UNIT) std::memset(values + t / UNIT * PANEL, 0, PANEL * sizeof *values);
#endif
    }
}

}  // namespace KV_VARIANT::attention
