// Products of rows with packed weights. A tile is up to MAX_ROWS rows by one panel of 32 outputs; its sums stay in
// registers over all inputs, in the order of the inputs: a row's result does not depend on the other rows.
#pragma once
#include "api.h"
#include "simd.h"
#include "team.h"

namespace KV_VARIANT {

constexpr int PANEL = 2 * LANES;
// What registers hold: 2 * MAX_ROWS sums, a panel's weights and an activation.
constexpr int MAX_ROWS = VECTOR_BYTES == 64 ? 12 : 3;
constexpr int CACHE_LINE = 64;
constexpr int LINES_AHEAD = 256;  // prefetched before the weights in use: hides memory latency behind 12 rows of arithmetic
// How near to prefetch, as __builtin_prefetch counts: Intel's cores, which get this variant, wait for more lines at once on the
// way to the second-level cache than to the first.
#if defined(__AVX512F__) && !defined(KV_HAS_BF16_DOT)
constexpr int NEAR = 2;
#else
constexpr int NEAR = 3;
#endif

template <int ROWS>
using Tile = Lanes[ROWS][2];

// The activations of a product. stride: numbers from one row to the next.
template <class T>
struct Rows {
    const T* x;
    int64_t stride;
    const float* scales = nullptr;  // [rows], of int8 activations
    const float* sums = nullptr;    // [rows][in / group], of activations under int4 weights

    const T* operator[](int row) const { return x + row * stride; }
    Rows from(int row, int sums_per_row) const {
        return {x + row * stride, stride, scales ? scales + row : scales, sums ? sums + row * sums_per_row : sums};
    }
};

// What to fetch into the cache beside the work on a panel: for each two lines of it one or two others.
struct Fetch {
    const char* next;
    int64_t step;  // one or two lines

    KV_INLINE void operator()() {
        __builtin_prefetch(next, 0, NEAR);
        __builtin_prefetch(next + step - CACHE_LINE, 0, NEAR);
        next += step;
    }
};

// acc += input k of each row times the weights of that input, w0 and w1.
template <int ROWS>
KV_INLINE void add_outer(Rows<float> rows, int k, Lanes w0, Lanes w1, Tile<ROWS>& acc) {
    for (int m = 0; m < ROWS; ++m) {
        acc[m][0] = multiply_add(rows[m][k], w0, acc[m][0]);
        acc[m][1] = multiply_add(rows[m][k], w1, acc[m][1]);
    }
}

// Each kind of weights says what activations it takes and multiplies one tile.
struct Float32Weights {
    using Act = float;
    static constexpr bool IS_SLICED = true;
    static int64_t panel_bytes(const kv_linear& l) { return int64_t(l.in) * PANEL * 4; }

    template <int ROWS>
    static KV_INLINE void multiply(const kv_linear& l, int, const char* panel, Fetch fetch, Rows<float> rows,
                                   Tile<ROWS>& acc) {
        const float* w = reinterpret_cast<const float*>(panel);
        for (int k = 0; k < l.in; ++k, w += PANEL) {
            fetch();
            add_outer<ROWS>(rows, k, load(w), load(w + LANES), acc);
        }
    }
};

// bfloat16 weights for processors without bfloat16 products: a shift makes each a float32.
struct ShiftedWeights {
    using Act = float;
    static constexpr bool IS_SLICED = true;
    static int64_t panel_bytes(const kv_linear& l) { return int64_t(l.in + 1) / 2 * PANEL * 4; }

    static KV_INLINE Lanes even(Words pairs) {
        KV_PARTS pairs.v[p] <<= 16;
        return as_floats(pairs);
    }
    static KV_INLINE Lanes odd(Words pairs) {
        KV_PARTS pairs.v[p] &= 0xffff0000u;
        return as_floats(pairs);
    }

    template <int ROWS>
    static KV_INLINE void multiply(const kv_linear& l, int, const char* w, Fetch fetch, Rows<float> rows,
                                   Tile<ROWS>& acc) {
        int k = 0;
        for (; k + 1 < l.in; k += 2, w += PANEL * 4) {
            fetch();
            add_outer<ROWS>(rows, k, even(load_words(w)), even(load_words(w + CACHE_LINE)), acc);
            keep_loads_here();
            add_outer<ROWS>(rows, k + 1, odd(load_words(w)), odd(load_words(w + CACHE_LINE)), acc);
        }
        if (k < l.in) add_outer<ROWS>(rows, k, even(load_words(w)), even(load_words(w + CACHE_LINE)), acc);
    }

    // One panel as Float32Weights take it. out: [in][32].
    static void expand(const kv_linear& l, const char* w, char* expanded) {
        float* out = reinterpret_cast<float*>(expanded);
        for (int k = 0; k < l.in; k += 2, w += PANEL * 4)
            for (int half = 0; half < 2; ++half) {
                const Words pairs = load_words(w + half * CACHE_LINE);
                store(out + k * PANEL + half * LANES, even(pairs));
                if (k + 1 < l.in) store(out + (k + 1) * PANEL + half * LANES, odd(pairs));
            }
    }
};

#ifdef KV_HAS_BF16_DOT
struct PairedWeights {
    using Act = bf16;
    static constexpr bool IS_SLICED = true;
    static int64_t panel_bytes(const kv_linear& l) { return ShiftedWeights::panel_bytes(l); }

    template <int ROWS>
    static KV_INLINE void multiply(const kv_linear& l, int, const char* w, Fetch fetch, Rows<bf16> rows,
                                   Tile<ROWS>& acc) {
        int k = 0;
        for (; k + 1 < l.in; k += 2, w += PANEL * 4) {
            fetch();
            const Words w0 = load_words(w), w1 = load_words(w + CACHE_LINE);
            for (int m = 0; m < ROWS; ++m) {
                const uint32_t pair = load_pair(rows[m] + k);
                acc[m][0] = dot_pairs(acc[m][0], w0, pair);
                acc[m][1] = dot_pairs(acc[m][1], w1, pair);
            }
        }
        if (k < l.in)
            for (int m = 0; m < ROWS; ++m) {
                const uint32_t pair = rows[m][k].bits;
                acc[m][0] = dot_pairs(acc[m][0], load_words(w), pair);
                acc[m][1] = dot_pairs(acc[m][1], load_words(w + CACHE_LINE), pair);
            }
    }
};
#endif

// Where a product's results go.
struct Output {
    void* y;
    int32_t dtype;
    int64_t stride;
    bool activates;  // silu(first half) * second half, of paired weights

    KV_INLINE void put(int row, int column, Lanes a, int count) const {
        if (count <= 0) return;
        if (dtype == KV_F32) {
            float* to = static_cast<float*>(y) + row * stride + column;
            count >= LANES ? store(to, a) : store_some(to, a, count);
        } else {
            bf16* to = static_cast<bf16*>(y) + row * stride + column;
            count >= LANES ? store(to, a) : store_some(to, a, count);
        }
    }
};

inline int num_panels(const kv_linear& l) { return l.is_paired ? (l.out / 2 + LANES - 1) / LANES : (l.out + PANEL - 1) / PANEL; }

template <int ROWS>
KV_INLINE void put_tile(const kv_linear& l, const Output& output, int row, int panel, Tile<ROWS>& acc) {
    const int half = l.out / 2;
    const int first = l.is_paired ? panel * LANES : panel * PANEL;
    const int second = l.is_paired ? half + first : first + LANES;
    const int count0 = (l.is_paired ? half : l.out) - first, count1 = l.out - second;
    Lanes bias0 = zeros(), bias1 = zeros();
    if (l.bias) {
        bias0 = load_some(l.bias + first, count0 < LANES ? count0 : LANES);
        bias1 = load_some(l.bias + second, count1 < 0 ? 0 : count1 < LANES ? count1 : LANES);
    }
    for (int m = 0; m < ROWS; ++m) {
        const Lanes a = acc[m][0] + bias0, b = acc[m][1] + bias1;
        if (output.activates) {
            output.put(row + m, first, silu(a) * b, count0);
        } else {
            output.put(row + m, first, a, count0);
            output.put(row + m, second, b, count1);
        }
    }
}

// Some of the inputs of a panel's product. All but the last leave sums for the next.
struct Slice {
    float* sums;  // [rows][32]
    bool is_first, is_last;
};

template <class Weights, int ROWS>
__attribute__((noinline)) void multiply_tile(const kv_linear& l, int panel_index, const char* panel, Fetch fetch,
                                             Rows<typename Weights::Act> rows, const Output& output, int row,
                                             Slice slice) {
    Tile<ROWS> acc;
    for (int m = 0; m < ROWS; ++m)
        for (int half = 0; half < 2; ++half)
            acc[m][half] = slice.is_first ? zeros() : load(slice.sums + m * PANEL + half * LANES);
    Weights::template multiply<ROWS>(l, panel_index, panel, fetch, rows, acc);
    if (!slice.is_last) {
        for (int m = 0; m < ROWS; ++m)
            for (int half = 0; half < 2; ++half) store(slice.sums + m * PANEL + half * LANES, acc[m][half]);
        return;
    }
    Tile<ROWS> results;  // clang would keep acc itself in memory during the product, because put_tile is a loop
    for (int m = 0; m < ROWS; ++m)
        for (int half = 0; half < 2; ++half) results[m][half] = acc[m][half];
    put_tile<ROWS>(l, output, row, panel_index, results);
}

// The tile functions for 1, 2, ... MAX_ROWS rows.
template <class Weights, int... COUNT>
KV_INLINE void multiply_rows(int count, std::integer_sequence<int, COUNT...>, const kv_linear& l, int panel_index,
                             const char* panel, Fetch fetch, Rows<typename Weights::Act> rows, const Output& output,
                             int row, Slice slice) {
    using Function = decltype(&multiply_tile<Weights, 1>);
    static constexpr Function functions[] = {&multiply_tile<Weights, COUNT + 1>...};
    functions[count - 1](l, panel_index, panel, fetch, rows, output, row, slice);
}

// Several tiles take a panel in slices of this many inputs, which stay in the cache from one tile to the next.
constexpr int SLICE_INPUTS = 256;
// With more tiles a product is bound by its arithmetic.
constexpr int MOST_SLICED_TILES = 4;

// One panel by `num_rows` rows from `row` on, in tiles of nearly equal size. With two tiles or more, each of the first two
// fetches half of the next slice while it computes on this one, so that memory is busy all the time.
template <class Weights>
void multiply_panel(const kv_linear& l, int panel_index, const char* panel, int64_t next_panel,
                    Rows<typename Weights::Act> rows, const Output& output, int row, int num_rows) {
    const int tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const int groups = l.group ? l.in / l.group : 0;
    const bool is_sliced = Weights::IS_SLICED && tiles > 1 && tiles <= MOST_SLICED_TILES;
    const int slices = is_sliced ? (l.in + SLICE_INPUTS - 1) / SLICE_INPUTS : 1;
    alignas(CACHE_LINE) float sums[MOST_SLICED_TILES * MAX_ROWS * PANEL];
    kv_linear part = l;
    for (int s = 0, from = 0; s < slices; ++s, from += part.in) {
        part.in = s + 1 < slices ? l.in / slices / 2 * 2 : l.in - from;
        int64_t bytes = next_panel;
        if constexpr (Weights::IS_SLICED)
            if (slices > 1) bytes = Weights::panel_bytes(part);
        for (int t = 0; t < tiles; ++t) {
            const int lo = num_rows * t / tiles, hi = num_rows * (t + 1) / tiles;
            const Fetch fetch = tiles == 1 ? Fetch{panel + LINES_AHEAD * CACHE_LINE, 2 * CACHE_LINE}
                                           : Fetch{panel + bytes + (t == 1 ? bytes / 2 : 0), CACHE_LINE};
            Rows<typename Weights::Act> own = rows.from(row + lo, groups);
            own.x += from;
            multiply_rows<Weights>(hi - lo, std::make_integer_sequence<int, MAX_ROWS>{}, part, panel_index, panel, fetch,
                                   own, output, row + lo, {sums + lo * PANEL, s == 0, s + 1 == slices});
        }
        panel += bytes;
    }
}

// Panels by blocks of rows, shared out among the team.
template <class Weights>
void multiply(Worker& w, const kv_linear& l, Rows<typename Weights::Act> rows, const Output& output, int num_rows) {
    constexpr int BLOCK = 16 * MAX_ROWS, CHUNKS_PER_MEMBER = 8;
    const int panels = num_panels(l), blocks = (num_rows + BLOCK - 1) / BLOCK;
    const int wanted = CHUNKS_PER_MEMBER * w.team.size();
    const int per_chunk = blocks > 1 || panels <= wanted ? 1 : panels / wanted;
    const int chunks = (panels + per_chunk - 1) / per_chunk;
    const int64_t bytes = Weights::panel_bytes(l);
    const char* weight = static_cast<const char*>(l.weight);
    w.for_each(chunks * blocks, [&](int task) {
        const int block = task % blocks, first = task / blocks * per_chunk;
        const int lo = num_rows * block / blocks, hi = num_rows * (block + 1) / blocks;
        for (int p = first; p < first + per_chunk && p < panels; ++p)
            multiply_panel<Weights>(l, p, weight + p * bytes, bytes, rows, output, lo, hi - lo);
    });
}

// Bytes of a panel that was expanded to float32.
inline int64_t expanded_bytes(const kv_linear& l) { return int64_t(l.in + 1) * PANEL * 4; }

// Called outside of run().
inline void reserve_expanded(kv_team& team, const kv_linear& l) {
    team.buffers[kv_team::PARTIAL].reserve(team.size() * expanded_bytes(l));
}

// Many rows: each panel is expanded once, in the member's own part of a buffer, to what Weights multiply.
template <class From, class Weights>
void multiply_expanded(Worker& w, const kv_linear& l, int64_t panel_bytes, Rows<typename Weights::Act> rows,
                       const Output& output, int num_rows) {
    char* own = w.team.buffers[kv_team::PARTIAL].as<char>() + expanded_bytes(l) * w.index;
    w.for_each(num_panels(l), [&](int p) {
        From::expand(l, static_cast<const char*>(l.weight) + p * panel_bytes, own);
        multiply_panel<Weights>(l, p, own, 0, rows, output, 0, num_rows);
    });
}

constexpr int EXPAND_FROM_ROWS = 4 * MAX_ROWS;

// Called outside of run(), before `product`.
inline void reserve_product(kv_team& team, const kv_linear& l, int num_rows) {
    if (l.format == KV_LINEAR_BF16 && num_rows >= EXPAND_FROM_ROWS) reserve_expanded(team, l);
}

inline void product(Worker& w, const kv_linear& l, const float* x, int64_t stride, const Output& output, int num_rows) {
    if (l.format == KV_LINEAR_F32)
        multiply<Float32Weights>(w, l, {x, stride}, output, num_rows);
    else if (num_rows >= EXPAND_FROM_ROWS)
        multiply_expanded<ShiftedWeights, Float32Weights>(w, l, ShiftedWeights::panel_bytes(l), {x, stride}, output,
                                                          num_rows);
    else
        multiply<ShiftedWeights>(w, l, {x, stride}, output, num_rows);
}

#ifdef KV_HAS_BF16_DOT
inline void product(Worker& w, const kv_linear& l, const bf16* x, int64_t stride, const Output& output, int num_rows) {
    multiply<PairedWeights>(w, l, {x, stride}, output, num_rows);
}
#endif

}  // namespace KV_VARIANT
