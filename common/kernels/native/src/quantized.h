// Integer weights: int8 with rows rounded to int8; int4 in groups that share a scale, with floating-point rows, or with rows
// rounded to 16 bits; and MXFP4, whose codes are floating-point numbers.
#pragma once
#include "group_codes.h"

namespace KV_VARIANT {

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

    // Turns the sums of products of codes of some rows and one half of a panel into results. scales: of the rows.
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

// codes = round(x / scale) + offset, half to even. Returns the scale, max|x| / top; not-a-number if x holds that or infinity.
// x, codes: [count].
template <class Act, class Code>
float round_to_codes(const Act* x, int count, float top, int offset, Code* codes) {
    Lanes highest = zeros(), poison = zeros();
    for_lanes(count, [&](int i, int some) {
        const Lanes a = read(x + i, some);
        highest = max(highest, max(a, zeros() - a));
        poison = multiply_add(0.0f, a, poison);
    });
    const float scale = std::fmax(largest(highest) / top, 1e-20f) + sum(poison);
    for_lanes(count, [&](int i, int some) {
        // Adding 1.5 * 2^23 rounds to an integer, which the low bits then hold.
        const Words bits = as_words(read(x + i, some) / splat(scale) + splat(12582912.0f));
        uint32_t lanes[LANES];
        std::memcpy(lanes, &bits, sizeof lanes);
        for (int j = 0; j < some; ++j) codes[i + j] = Code(lanes[j] + offset);
    });
    return scale;
}

// Quantizes rows to int8, for int8 weights. scales: [rows].
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
    multiply_by_tiles<tiles::INT8>(w, l, Int8Weights::panel_bytes(l), rows, output, num_rows, finish);
#else
    multiply<Int8Weights>(w, l, rows, output, num_rows);
#endif
}

inline int64_t int4_panel_bytes(const kv_linear& l) { return int64_t(l.in) / 8 * PANEL * 4; }

KV_INLINE Lanes group_sum(Lanes sum, const float*, int64_t) { return sum; }
KV_INLINE Lanes group_sum(Ints sum, const float* scales, int64_t at) { return as_lanes(sum) * splat(scales[at]); }

// Inputs of a part of a group: all of it, or MOST_SUMMED. The last part of a group may be smaller.
template <class Codes>
int part_inputs(const kv_linear& l) {
    return std::min(l.group, Codes::MOST_SUMMED);
}
template <class Codes>
int parts_per_group(const kv_linear& l) {
    return ceil_div(l.group, part_inputs<Codes>(l));
}

template <class Codes>
struct GroupTiles : UsualTiles {
    using Act = typename Codes::Act;
    static constexpr bool IS_SLICED = false;
    static int sums_per_row(const kv_linear& l) { return Codes::HAS_ZEROS ? l.in / l.group * parts_per_group<Codes>(l) : 0; }
};

// For each part, whose sums of row * (code + ADDED) `add_part` adds up:
// acc += scale * (sum - (zero + ADDED) * sum of the row).
template <class Codes, int ROWS, int COUNT, class F>
KV_INLINE void multiply_groups(const kv_linear& l, int first_half, Rows<typename Codes::Act> rows, Tile<ROWS, COUNT>& acc,
                               const F& add_part) {
    const int groups = l.in / l.group, most = part_inputs<Codes>(l), parts = parts_per_group<Codes>(l);
    for (int g = 0; g < groups; ++g)
        for (int part = 0; part < parts; ++part) {
            typename Codes::Sums sums[ROWS][COUNT];
            for (int m = 0; m < ROWS; ++m)
                for (int h = 0; h < COUNT; ++h) sums[m][h] = {};
            add_part(g * l.group + part * most, g * l.group + std::min((part + 1) * most, l.group), sums);
            for (int h = 0; h < COUNT; ++h) {
                const int half = first_half + h;
                const int64_t at = (int64_t(half / 2) * groups + g) * PANEL + half % 2 * LANES;
                const Lanes scale = load(l.scale + at);
                Lanes zero;
                if constexpr (Codes::HAS_ZEROS) zero = load(l.zero + at) + splat(Codes::ADDED);
                for (int m = 0; m < ROWS; ++m) {
                    const int64_t of_row = (int64_t(m) * groups + g) * parts + part;
                    Lanes sum = group_sum(sums[m][h], rows.scales, of_row);
                    if constexpr (Codes::HAS_ZEROS) sum = sum - zero * splat(rows.sums[of_row]);
                    acc[m][h] = multiply_add(scale, sum, acc[m][h]);
                }
            }
        }
}

// From this many rows on, expanding a panel takes less time than the conversions in all tiles; measured on Zen 3, 4 and 5.
constexpr int EXPAND_INT4_FROM_ROWS = TILE_HALVES == 2 ? MAX_ROWS / 2 : 32;

// Few rows: codes become numbers in registers, for each tile.
template <class Codes>
struct CodedGroups : GroupTiles<Codes> {
    using Act = typename Codes::Act;
    // Numbers of float32 need registers, too.
    static constexpr int ROWS = TILE_HALVES == 2 ? EXPAND_INT4_FROM_ROWS - 1 : sizeof(Act) == 2 ? MAX_ROWS : MAX_ROWS * 2 / 3;
    static int64_t panel_bytes(const kv_linear& l) { return int4_panel_bytes(l); }

    template <int ROWS, int COUNT, class F>
    static KV_INLINE void multiply(const kv_linear& l, Halves halves, F fetch, Rows<Act> rows, Tile<ROWS, COUNT>& acc) {
        const auto add_part = [&](int first, int end, auto& sums) {
            Halves own = halves.from(int64_t(first) / 8 * PANEL * 4);
            for (int k = first; k < end; k += 8, own.advance()) {
                fetch();
#pragma GCC unroll 4  // else gcc keeps sums in memory
                for (int h = 0; h < COUNT; ++h) {
                    const Words codes = load_words(own[h]);
                    for (int j = 0; j < 4; ++j)
                        Codes::template add_pair<ROWS, COUNT>(sums, h, codes, 4 * j, rows, k + 2 * j);
                }
            }
        };
        multiply_groups<Codes, ROWS, COUNT>(l, halves.first, rows, acc, add_part);
    }
};

// Many rows: each panel's codes become numbers once, in the same order of sums as above.
template <class Codes>
struct ExpandedGroups : GroupTiles<Codes> {
    using Act = typename Codes::Act;

    static void expand(const kv_linear& l, const char* w, char* out) {
        for (int k = 0; k < l.in; k += 8, w += PANEL * 4)
            for (int half = 0; half < 2; ++half) {
                const Words codes = load_words(w + half * CACHE_LINE);
                for (int j = 0; j < 4; ++j)
                    Codes::expand(codes, 4 * j, out + (k / 2 + j) * Codes::EXPANDED_PAIR_BYTES, half);
            }
    }
    template <int ROWS, int COUNT, class F>
    static KV_INLINE void multiply(const kv_linear& l, Halves halves, F, Rows<Act> rows, Tile<ROWS, COUNT>& acc) {
        const auto add_part = [&](int first, int end, auto& sums) {
            Halves own = halves.from(int64_t(first) / 2 * Codes::EXPANDED_PAIR_BYTES);
            for (int k = first; k < end; k += 2)
                Codes::template add_expanded_pair<ROWS, COUNT>(sums, own, rows, k);
        };
        multiply_groups<Codes, ROWS, COUNT>(l, halves.first, rows, acc, add_part);
    }
};

// The sum of each part of each row: [rows][parts].
template <class Act>
void sum_parts(Worker& w, const kv_linear& l, const Act* x, int64_t stride, int num_rows, float* sums) {
    using Codes = Int4Weights<Act>;
    const int most = part_inputs<Codes>(l);
    w.for_each(num_rows, [&](int row) {
        float* to = sums + int64_t(row) * GroupTiles<Codes>::sums_per_row(l);
        for (int first = 0; first < l.in; first += l.group)
            for (int part = 0; part < l.group; part += most) {
                const Act* from = x + row * stride + first + part;
                const int count = std::min(l.group - part, most);
                Lanes total = zeros();
                for_lanes(count, [&](int i, int some) { total = total + read(from + i, some); });
                *to++ = sum(total);
            }
    });
}

// Quantizes rows to 16 bits, each group on its own, for int4 weights. scales, sums (of the rounded numbers): [rows][in / group].
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

// Memory of rows for integer weights, enough for each format: codes of 16 bits; a scale and a sum for each group, or sums of its
// parts.
inline size_t codes_bytes(const kv_linear& l, int num_rows) {
    return l.format == KV_LINEAR_INT8 || l.format == KV_LINEAR_INT4 ? num_rows * code_stride(l) * sizeof(int16_t) : 0;
}
inline size_t sums_bytes(const kv_linear& l, int num_rows) {
    const int groups = l.group ? l.in / l.group * ceil_div(l.group, 256) : 1;
    return l.format == KV_LINEAR_INT8 || l.format == KV_LINEAR_INT4 ? 2 * sizeof(float) * num_rows * groups : 0;
}

// Called outside of run(), before `linear`.
inline void reserve_linear(kv_team& team, const kv_linear& l, int num_rows) {
    reserve_product(team, l, num_rows);
    if (l.format >= KV_LINEAR_INT4 && num_rows >= EXPAND_INT4_FROM_ROWS) reserve_expanded(team, l);
    team.buffers[kv_team::CODES].reserve(codes_bytes(l, num_rows));
    team.buffers[kv_team::SUMS].reserve(sums_bytes(l, num_rows));
}

template <class Codes>
void group_product(Worker& w, const kv_linear& l, Rows<typename Codes::Act> rows, const Output& output, int num_rows) {
    if (num_rows < EXPAND_INT4_FROM_ROWS) return multiply<CodedGroups<Codes>>(w, l, rows, output, num_rows);
    multiply_expanded<ExpandedGroups<Codes>, ExpandedGroups<Codes>>(w, l, int4_panel_bytes(l), rows, output, num_rows);
}

// y = x W^T + bias for any format of weights. Model: the model's type. Act is float if the processor does not multiply bfloat16.
template <class Model, class Act>
void linear(Worker& w, const kv_linear& l, const Act* x, int64_t stride, const Output& output, int num_rows) {
    float* sums = w.scratch<float>(kv_team::SUMS);
    if (l.format == KV_LINEAR_INT8) {
        uint8_t* codes = w.scratch<uint8_t>(kv_team::CODES);
        quantize_rows(w, l, x, stride, num_rows, codes, sums);
        return int8_product(w, l, {codes, code_stride(l), sums}, output, num_rows);
    }
    if (l.format == KV_LINEAR_FP4) return group_product<Fp4Weights<Act>>(w, l, {x, stride}, output, num_rows);
    if (l.format != KV_LINEAR_INT4) return product(w, l, x, stride, output, num_rows);
#ifdef KV_HAS_INT16_DOT
    if constexpr (sizeof(Model) == 2) {
        int16_t* codes = w.scratch<int16_t>(kv_team::CODES);
        float* scales = sums + int64_t(num_rows) * (l.in / l.group);
        quantize_groups(w, l, x, stride, num_rows, codes, scales, sums);
        group_product<Int4Weights<int16_t>>(w, l, {codes, code_stride(l), scales, sums}, output, num_rows);
    } else
#endif
    {
        sum_parts(w, l, x, stride, num_rows, sums);
        group_product<Int4Weights<Act>>(w, l, {x, stride, nullptr, sums}, output, num_rows);
    }
}

}  // namespace KV_VARIANT
