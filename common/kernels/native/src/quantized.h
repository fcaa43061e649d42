// Integer weights: int8 with rows rounded to int8; int4 in groups that share a scale, with floating-point rows, or with rows
// rounded to 16 bits.
#pragma once
#include <type_traits>

#include "linear_tiles.h"

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

// Rows are stored as code + OFFSET: AVX-512 and tiles multiply unsigned rows by signed weights.
#if defined(__AVX512VNNI__) || defined(KV_HAS_TILES)
constexpr int OFFSET = 128;
#else
constexpr int OFFSET = 0;
#endif

// sum += a, for sums that a loop keeps in registers.
KV_INLINE void add_to(IntPart& sum, IntPart a) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(a));  // gcc itself adds in another order, which takes more registers than there are
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
        // |weight| * (row with the weight's sign): pairs of them fit 16 bits, because codes are at most 127.
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

struct Int8Weights : UsualTiles {
    using Act = uint8_t;
    static constexpr bool IS_SLICED = false;
#if defined(__AVX2__)
    // No weight is converted: more outputs share each load of a row's codes instead.
    static constexpr int ROWS = SUM_REGISTERS / (2 * PARTS), HALVES = 2;
#endif
    static int64_t panel_bytes(const kv_linear& l) { return int64_t(l.in + 3) / 4 * PANEL * 4; }

    template <int ROWS, int COUNT, class F>
    static KV_INLINE void multiply(const kv_linear& l, Halves halves, F fetch, Rows<uint8_t> rows, Tile<ROWS, COUNT>& acc) {
        Ints sums[ROWS][COUNT] = {};
        for (int k = 0; k < l.in; k += 4, halves.advance()) {
            fetch();
            Words w[COUNT];
            for (int h = 0; h < COUNT; ++h) w[h] = load_words(halves[h]);
            for (int m = 0; m < ROWS; ++m) {
                uint32_t four;
                std::memcpy(&four, rows[m] + k, 4);
                for (int h = 0; h < COUNT; ++h) sums[m][h] = dot_four(sums[m][h], w[h], four);
            }
        }
        for (int h = 0; h < COUNT; ++h)
            finish(l, halves.first + h, ROWS, rows.scales, [&](int m) { return sums[m][h]; }, [&](int m, Lanes a) { acc[m][h] = a; });
    }

    // Results of some rows and one half of a panel, made of sums of products of codes. scales: of the rows.
    template <class Sums, class Results>
    static KV_INLINE void finish(const kv_linear& l, int half, int num_rows, const float* scales, const Sums& sums,
                                 const Results& results) {
        const Lanes scale = load(l.scale + half * LANES);
        Ints added{};  // by OFFSET in each row code: OFFSET times the sum of an output's codes
        if (OFFSET) KV_PARTS added.v[p] = __builtin_convertvector(load(l.zero + half * LANES).v[p], IntPart) * OFFSET;
        for (int m = 0; m < num_rows; ++m) {
            Ints sum = sums(m);
            KV_PARTS sum.v[p] -= added.v[p];
            results(m, as_lanes(sum) * (scale * splat(scales[m])));
        }
    }
};

inline int64_t code_stride(const kv_linear& l) { return (l.in + 3) / 4 * 4 + CACHE_LINE; }

// Puts round(x / scale) + offset into `codes`, half to even, and returns the scale, which is max|x| / top. It is not-a-number if
// x holds that or infinity. x, codes: [count].
template <class Act, class Code>
float round_to_codes(const Act* x, int count, float top, int offset, Code* codes) {
    Lanes highest = zeros(), poison = zeros();
    for (int i = 0; i < count; i += LANES) {
        const Lanes a = load_some(x + i, std::min(count - i, LANES));
        highest = max(highest, max(a, zeros() - a));
        poison = multiply_add(0.0f, a, poison);
    }
    const float scale = std::fmax(largest(highest) / top, 1e-20f) + sum(poison);
    for (int i = 0; i < count; i += LANES) {
        const int some = std::min(count - i, LANES);
        // Adding 1.5 * 2^23 rounds to an integer, which the low bits then hold.
        const Words bits = as_words(load_some(x + i, some) / splat(scale) + splat(12582912.0f));
        uint32_t lanes[LANES];
        std::memcpy(lanes, &bits, sizeof lanes);
        for (int j = 0; j < some; ++j) codes[i + j] = Code(lanes[j] + offset);
    }
    return scale;
}

// To int8 under int8 weights. scales: [rows].
template <class Act>
void quantize_rows(Worker& w, const kv_linear& l, const Act* x, int64_t stride, int num_rows, uint8_t* codes,
                   float* scales) {
    w.for_each(num_rows, [&](int row) {
        uint8_t* to = codes + row * code_stride(l);
        scales[row] = round_to_codes(x + row * stride, l.in, 127, OFFSET, to);
        for (int i = l.in; i % 4; ++i) to[i] = OFFSET;
    });
}

inline void int8_product(Worker& w, const kv_linear& l, Rows<uint8_t> rows, const Output& output, int num_rows) {
#ifdef KV_HAS_TILES
    const auto finish = [&](int panel, int row, int count, char* sums) {
        for (int half = 0; half < 2; ++half) {
            char* own = sums + half * CACHE_LINE;
            const auto sum_of = [&](int m) {
                Ints sum;
                std::memcpy(&sum, own + m * PANEL * 4, sizeof sum);
                return sum;
            };
            Int8Weights::finish(l, 2 * panel + half, count, rows.scales + row, sum_of,
                                [&](int m, Lanes a) { store(reinterpret_cast<float*>(own + m * PANEL * 4), a); });
        }
    };
    multiply_by_tiles<tiles::Int8>(w, l, Int8Weights::panel_bytes(l), rows, output, num_rows, finish);
#else
    multiply<Int8Weights>(w, l, rows, output, num_rows);
#endif
}

// int4 codes of two inputs at a time as numbers that rows multiply, for three types of rows. ADDED is what each number is above
// its code. `Sums` add up the products of at most MOST_SUMMED inputs: sums of more would be rounded too often.
template <class Act>
struct Int4Weights;

template <>
struct Int4Weights<float> {
    using Sums = Lanes;
    static constexpr float ADDED = 0;
    static constexpr int MOST_SUMMED = 1024;

    static KV_INLINE Lanes number(Words codes, int shift) {
        Ints number;
        KV_PARTS number.v[p] = (IntPart)((codes.v[p] >> shift) & 0xf);
        return as_lanes(number);
    }
    template <int ROWS, int COUNT>
    static KV_INLINE void add_pair(Tile<ROWS, COUNT>& sums, int h, Words codes, int shift, Rows<float> rows, int k) {
        const Lanes w0 = number(codes, shift), w1 = number(codes, shift + 16);
        for (int m = 0; m < ROWS; ++m) sums[m][h] = multiply_add(rows[m][k], w0, sums[m][h]);
        for (int m = 0; m < ROWS; ++m) sums[m][h] = multiply_add(rows[m][k + 1], w1, sums[m][h]);
    }
    // A pair of inputs of 16 outputs as `add_expanded_pair` takes them, which moves `halves` to the next pair.
    static KV_INLINE void expand(Words codes, int shift, char* pair, int half) {
        float* out = reinterpret_cast<float*>(pair) + half * LANES;
        store(out, number(codes, shift));
        store(out + PANEL, number(codes, shift + 16));
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

// Rows whose pairs the processor multiplies at once.
template <class Act>
struct PairedInt4Weights {
    static constexpr int EXPANDED_PAIR_BYTES = PANEL * 4;

    template <int ROWS, int COUNT, class Sums>
    static KV_INLINE void add_pair(Sums (&sums)[ROWS][COUNT], int h, Words codes, int shift, Rows<Act> rows, int k) {
        const Words w = Int4Weights<Act>::number(codes, shift);
        for (int m = 0; m < ROWS; ++m) sums[m][h] = dot_pairs(sums[m][h], w, load_pair(rows[m] + k));
    }
    static KV_INLINE void expand(Words codes, int shift, char* pair, int half) {
        const Words w = Int4Weights<Act>::number(codes, shift);
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
struct Int4Weights<bf16> : PairedInt4Weights<bf16> {
    using Sums = Lanes;
    static constexpr float ADDED = 128;  // 128 + code is a bfloat16 whose low bits are the code
    // ADDED makes sums up to 100 times as large as those of codes less zeros, and their rounding errors with them. Intel's
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
struct Int4Weights<int16_t> : PairedInt4Weights<int16_t> {
    using Sums = Ints;
    static constexpr float ADDED = 0;
    static constexpr int MOST_SUMMED = INT32_MAX;  // whole numbers are not rounded

    static KV_INLINE Words number(Words codes, int shift) {
        KV_PARTS codes.v[p] = (codes.v[p] >> shift) & 0x000f000fu;
        return codes;
    }
};
#endif

inline int64_t int4_panel_bytes(const kv_linear& l) { return int64_t(l.in) / 8 * PANEL * 4; }

KV_INLINE Lanes group_sum(Lanes sum, const float*, int64_t) { return sum; }
KV_INLINE Lanes group_sum(Ints sum, const float* scales, int64_t at) { return as_lanes(sum) * splat(scales[at]); }

// Inputs of a part: a group, or up to MOST_SUMMED of its inputs. The last part of a group may be smaller.
template <class T>
int part_inputs(const kv_linear& l) {
    return std::min(l.group, Int4Weights<T>::MOST_SUMMED);
}
template <class T>
int parts_per_group(const kv_linear& l) {
    return ceil_div(l.group, part_inputs<T>(l));
}

// For each part, whose sums of row * (code + ADDED) `add_part` adds up:
// acc += scale * (sum - (zero + ADDED) * sum of the row).
template <class T, int ROWS, int COUNT, class F>
KV_INLINE void multiply_groups(const kv_linear& l, int first_half, Rows<T> rows, Tile<ROWS, COUNT>& acc, const F& add_part) {
    const int groups = l.in / l.group, most = part_inputs<T>(l), parts = parts_per_group<T>(l);
    for (int g = 0; g < groups; ++g)
        for (int part = 0; part < parts; ++part) {
            typename Int4Weights<T>::Sums sums[ROWS][COUNT];
            for (int m = 0; m < ROWS; ++m)
                for (int h = 0; h < COUNT; ++h) sums[m][h] = {};
            add_part(g * l.group + part * most, g * l.group + std::min((part + 1) * most, l.group), sums);
            for (int h = 0; h < COUNT; ++h) {
                const int half = first_half + h;
                const int64_t at = (int64_t(half / 2) * groups + g) * PANEL + half % 2 * LANES;
                const Lanes scale = load(l.scale + at);
                const Lanes zero = load(l.zero + at) + splat(Int4Weights<T>::ADDED);
                for (int m = 0; m < ROWS; ++m) {
                    const int64_t of_row = (int64_t(m) * groups + g) * parts + part;
                    const Lanes sum = group_sum(sums[m][h], rows.scales, of_row) - zero * splat(rows.sums[of_row]);
                    acc[m][h] = multiply_add(scale, sum, acc[m][h]);
                }
            }
        }
}

// From where on expanding a panel takes less time than the conversions of all tiles; measured on Zen 3, 4 and 5.
constexpr int EXPAND_INT4_FROM_ROWS = TILE_HALVES == 2 ? MAX_ROWS / 2 : 32;

// Few rows: codes become numbers in registers, for each tile.
template <class T>
struct CodedInt4 : UsualTiles {
    using Act = T;
    static constexpr bool IS_SLICED = false;
    // Numbers need registers, too, if they are float32.
    static constexpr int ROWS = TILE_HALVES == 2 ? EXPAND_INT4_FROM_ROWS - 1 : sizeof(T) == 2 ? MAX_ROWS : MAX_ROWS * 2 / 3;
    static int64_t panel_bytes(const kv_linear& l) { return int4_panel_bytes(l); }
    static int sums_per_row(const kv_linear& l) { return l.in / l.group * parts_per_group<T>(l); }

    template <int ROWS, int COUNT, class F>
    static KV_INLINE void multiply(const kv_linear& l, Halves halves, F fetch, Rows<T> rows, Tile<ROWS, COUNT>& acc) {
        const auto add_part = [&](int first, int end, auto& sums) {
            Halves own = halves.from(int64_t(first) / 8 * PANEL * 4);
            for (int k = first; k < end; k += 8, own.advance()) {
                fetch();
#pragma GCC unroll 4  // else gcc keeps sums in memory
                for (int h = 0; h < COUNT; ++h) {
                    const Words codes = load_words(own[h]);
                    for (int j = 0; j < 4; ++j)
                        Int4Weights<T>::template add_pair<ROWS, COUNT>(sums, h, codes, 4 * j, rows, k + 2 * j);
                }
            }
        };
        multiply_groups<T, ROWS, COUNT>(l, halves.first, rows, acc, add_part);
    }
};

// Many rows: each panel's codes become numbers once, in the same order of sums as above.
template <class T>
struct ExpandedInt4 : UsualTiles {
    using Act = T;
    static constexpr bool IS_SLICED = false;
    static int sums_per_row(const kv_linear& l) { return CodedInt4<T>::sums_per_row(l); }

    static void expand(const kv_linear& l, const char* w, char* out) {
        for (int k = 0; k < l.in; k += 8, w += PANEL * 4)
            for (int half = 0; half < 2; ++half) {
                const Words codes = load_words(w + half * CACHE_LINE);
                for (int j = 0; j < 4; ++j)
                    Int4Weights<T>::expand(codes, 4 * j, out + (k / 2 + j) * Int4Weights<T>::EXPANDED_PAIR_BYTES, half);
            }
    }
    template <int ROWS, int COUNT, class F>
    static KV_INLINE void multiply(const kv_linear& l, Halves halves, F, Rows<T> rows, Tile<ROWS, COUNT>& acc) {
        const auto add_part = [&](int first, int end, auto& sums) {
            Halves own = halves.from(int64_t(first) / 2 * Int4Weights<T>::EXPANDED_PAIR_BYTES);
            for (int k = first; k < end; k += 2)
                Int4Weights<T>::template add_expanded_pair<ROWS, COUNT>(sums, own, rows, k);
        };
        multiply_groups<T, ROWS, COUNT>(l, halves.first, rows, acc, add_part);
    }
};

// The sum of each part of each row: [rows][parts].
template <class Act>
void sum_parts(Worker& w, const kv_linear& l, const Act* x, int64_t stride, int num_rows, float* sums) {
    const int most = part_inputs<Act>(l);
    w.for_each(num_rows, [&](int row) {
        float* to = sums + int64_t(row) * CodedInt4<Act>::sums_per_row(l);
        for (int first = 0; first < l.in; first += l.group)
            for (int part = 0; part < l.group; part += most) {
                const Act* from = x + row * stride + first + part;
                const int count = std::min(l.group - part, most);
                Lanes total = zeros();
                for (int i = 0; i < count; i += LANES) total = total + load_some(from + i, std::min(count - i, LANES));
                *to++ = sum(total);
            }
    });
}

// To 16 bits under int4 weights, each group on its own. scales, sums: [rows][in / group]; sums are those of the rounded numbers.
template <class Act>
void quantize_groups(Worker& w, const kv_linear& l, const Act* x, int64_t stride, int num_rows, int16_t* codes,
                     float* scales, float* sums) {
    const int groups = l.in / l.group;
    const int top = std::min(INT16_MAX, INT32_MAX / 15 / l.group);  // a group's sum of products fits 32 bits
    w.for_each(num_rows, [&](int row) {
        for (int g = 0; g < groups; ++g) {
            int16_t* to = codes + row * code_stride(l) + g * l.group;
            const int64_t at = int64_t(row) * groups + g;
            scales[at] = round_to_codes(x + row * stride + g * l.group, l.group, float(top), 0, to);
            int total = 0;
            for (int i = 0; i < l.group; ++i) total += to[i];
            sums[at] = scales[at] * float(total);
        }
    });
}

// Called outside of run(), before `linear`.
inline void reserve_linear(kv_team& team, const kv_linear& l, int num_rows) {
    reserve_product(team, l, num_rows);
    if (l.format != KV_LINEAR_INT8 && l.format != KV_LINEAR_INT4) return;
    const int groups = l.group ? l.in / l.group * ceil_div(l.group, 256) : 1;
    // As much as any format takes: codes of 16 bits; a scale and a sum for each group, or sums of its parts.
    team.buffers[kv_team::CODES].reserve(num_rows * code_stride(l) * sizeof(int16_t));
    team.buffers[kv_team::SUMS].reserve(2 * sizeof(float) * num_rows * groups);
    if (l.format == KV_LINEAR_INT4 && num_rows >= EXPAND_INT4_FROM_ROWS) reserve_expanded(team, l);
}

template <class T>
void int4_product(Worker& w, const kv_linear& l, Rows<T> rows, const Output& output, int num_rows) {
    if (num_rows < EXPAND_INT4_FROM_ROWS) return multiply<CodedInt4<T>>(w, l, rows, output, num_rows);
    multiply_expanded<ExpandedInt4<T>, ExpandedInt4<T>>(w, l, int4_panel_bytes(l), rows, output, num_rows);
}

// y = x W^T + bias for any format of weights. Model: the model's own type, where Act may be float because the processor does
// not multiply bfloat16.
template <class Model, class Act>
void linear(Worker& w, const kv_linear& l, const Act* x, int64_t stride, const Output& output, int num_rows) {
    float* sums = w.team.buffers[kv_team::SUMS].as<float>();
    if (l.format == KV_LINEAR_INT8) {
        uint8_t* codes = w.team.buffers[kv_team::CODES].as<uint8_t>();
        quantize_rows(w, l, x, stride, num_rows, codes, sums);
        return int8_product(w, l, {codes, code_stride(l), sums}, output, num_rows);
    }
    if (l.format != KV_LINEAR_INT4) return product(w, l, x, stride, output, num_rows);
#ifdef KV_HAS_INT16_DOT
    if constexpr (sizeof(Model) == 2) {
        int16_t* codes = w.team.buffers[kv_team::CODES].as<int16_t>();
        float* scales = sums + int64_t(num_rows) * (l.in / l.group);
        quantize_groups(w, l, x, stride, num_rows, codes, scales, sums);
        int4_product<int16_t>(w, l, {codes, code_stride(l), scales, sums}, output, num_rows);
    } else
#endif
    {
        sum_parts(w, l, x, stride, num_rows, sums);
        int4_product<Act>(w, l, {x, stride, nullptr, sums}, output, num_rows);
    }
}

}  // namespace KV_VARIANT
