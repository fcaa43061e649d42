// Products of rows with packed weights. A tile is up to MAX_ROWS rows by a panel of 32 outputs, or by half of one; its sums
// stay in registers over all inputs, in the order of the inputs: a row's result does not depend on the other rows.
#pragma once
#include <algorithm>
#include <array>
#include <utility>

#include "api.h"
#include "simd.h"
#include "team.h"

namespace KV_VARIANT {

constexpr int PANEL = 2 * LANES;
inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Registers that hold a tile's sums. The others hold weights and an activation.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int SUM_REGISTERS = 24;
#else
constexpr int SUM_REGISTERS = 12;
#endif
// Halves of a panel in a tile of many rows. Where registers are short, half a panel leaves them for twice as many rows, which
// share each conversion of a weight.
constexpr int TILE_HALVES = VECTOR_BYTES == 64 ? 2 : 1;
constexpr int MAX_ROWS = SUM_REGISTERS / (PARTS * TILE_HALVES);
// Tiles of at most this many rows are always of whole panels: registers hold their sums and all weights of an input.
constexpr int FEW_ROWS = MAX_ROWS / 3;
constexpr int halves_of(int rows) { return rows <= FEW_ROWS ? 2 : TILE_HALVES; }
constexpr int CACHE_LINE = 64;
constexpr int LINES_AHEAD = 256;  // prefetched before the weights in use: hides memory latency behind 12 rows of arithmetic
// The locality that __builtin_prefetch takes. Intel's cores, which get the variants with 2, can wait for more lines at once on
// the way to the second-level cache than to the first.
#if defined(__AVX512F__) && (!defined(KV_HAS_BF16_DOT) || defined(KV_HAS_TILES))
constexpr int NEAR = 2;
#else
constexpr int NEAR = 3;
#endif

// Functions for 1, 2, ... MOST rows. make.operator()<ROWS>() returns one of them.
template <int MOST, class Make>
constexpr auto for_rows(const Make& make) {
    return [&]<int... I>(std::integer_sequence<int, I...>) {
        return std::array{make.template operator()<I + 1>()...};
    }(std::make_integer_sequence<int, MOST>{});
}

template <int ROWS, int COUNT>
using Tile = Lanes[ROWS][COUNT];  // COUNT: halves of panels

template <int ROWS, int COUNT>
KV_INLINE void clear(Tile<ROWS, COUNT>& sums) {
    for (int m = 0; m < ROWS; ++m)
        for (int h = 0; h < COUNT; ++h) sums[m][h] = zeros();
}

// The activations of a product. stride: numbers from one row to the next.
template <class T>
struct Rows {
    const T* x;
    int64_t stride;
    const float* scales = nullptr;  // of integer activations: [rows]; under int4 weights [rows][in / group]
    const float* sums = nullptr;    // of activations under int4 weights: [rows][parts of groups]

    const T* operator[](int row) const { return x + row * stride; }
    Rows from(int row, int sums_per_row) const {
        return {x + row * stride, stride, scales ? scales + row * (sums_per_row ? sums_per_row : 1) : scales,
                sums ? sums + row * sums_per_row : sums};
    }
};

// Fetches other lines into the cache during the work on a panel: one or two for each two lines of it.
struct Fetch {
    const char* next;
    int64_t step;  // one or two lines

    KV_INLINE void operator()() {
        __builtin_prefetch(next, 0, NEAR);
        __builtin_prefetch(next + step - CACHE_LINE, 0, NEAR);
        next += step;
    }
};
struct NoFetch {
    KV_INLINE void operator()() {}
};

// acc += input k of each row times the weights of that input.
template <int ROWS, int COUNT>
KV_INLINE void add_outer(Rows<float> rows, int k, const Lanes (&w)[COUNT], Tile<ROWS, COUNT>& acc) {
#pragma GCC unroll 12  // else clang keeps six rows' sums in memory
    for (int m = 0; m < ROWS; ++m)
        for (int h = 0; h < COUNT; ++h) acc[m][h] = multiply_add(rows[m][k], w[h], acc[m][h]);
}

// The halves of panels that a tile multiplies, from its first one on.
struct Halves {
    const char* weights;  // of the next inputs
    int64_t panel_bytes;
    int first;  // number of the tile's first half, counted through all panels

    KV_INLINE const char* operator[](int h) const { return weights + h / 2 * panel_bytes + h % 2 * CACHE_LINE; }
    KV_INLINE void advance() { weights += PANEL * 4; }
    KV_INLINE Halves from(int64_t byte) const { return {weights + byte, panel_bytes, first}; }
};

// The tiles of many rows. Each kind of weights inherits it and may override parts.
struct UsualTiles {
    static constexpr int ROWS = MAX_ROWS, HALVES = TILE_HALVES;
    static constexpr bool IS_SLICED = true;
    static int sums_per_row(const kv_linear&) { return 0; }
};

// Each kind of weights has the type of activations that it multiplies, and the product of one tile.
struct Float32Weights : UsualTiles {
    using Act = float;
    static int64_t panel_bytes(const kv_linear& l) { return int64_t(l.in) * PANEL * 4; }

    template <int ROWS, int COUNT, class F>
    static KV_INLINE void multiply(const kv_linear& l, Halves halves, F fetch, Rows<float> rows, Tile<ROWS, COUNT>& acc) {
        for (int k = 0; k < l.in; ++k, halves.advance()) {
            fetch();
            Lanes w[COUNT];
            for (int h = 0; h < COUNT; ++h) w[h] = load(reinterpret_cast<const float*>(halves[h]));
            add_outer<ROWS>(rows, k, w, acc);
        }
    }
};

// bfloat16 weights on processors without bfloat16 products: a shift turns each into float32.
struct ShiftedWeights : UsualTiles {
    using Act = float;
    static int64_t panel_bytes(const kv_linear& l) { return int64_t(l.in + 1) / 2 * PANEL * 4; }

    static KV_INLINE Lanes even(Words pairs) {
        KV_PARTS pairs.v[p] <<= 16;
        return as_floats(pairs);
    }
    static KV_INLINE Lanes odd(Words pairs) {
        KV_PARTS pairs.v[p] &= 0xffff0000u;
        return as_floats(pairs);
    }

    template <int ROWS, int COUNT, class F>
    static KV_INLINE void multiply(const kv_linear& l, Halves halves, F fetch, Rows<float> rows, Tile<ROWS, COUNT>& acc) {
        int k = 0;
        for (; k + 1 < l.in; k += 2, halves.advance()) {
            fetch();
            add<false>(halves, rows, k, acc);
            keep_loads_here();
            add<true>(halves, rows, k + 1, acc);
        }
        if (k < l.in) add<false>(halves, rows, k, acc);
    }

    // acc += input k of each row times the weights of that input, which are the even or the odd ones of pairs.
    template <bool IS_ODD, int ROWS, int COUNT>
    static KV_INLINE void add(Halves halves, Rows<float> rows, int k, Tile<ROWS, COUNT>& acc) {
        Lanes w[COUNT];
        for (int h = 0; h < COUNT; ++h) w[h] = IS_ODD ? odd(load_words(halves[h])) : even(load_words(halves[h]));
        add_outer<ROWS>(rows, k, w, acc);
    }

    // Turns one panel into one of Float32Weights. expanded: [in][32].
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

#if defined(KV_HAS_BF16_DOT) && !defined(KV_HAS_TILES)
// bfloat16 weights on processors that multiply pairs of bfloat16.
struct PairedWeights : UsualTiles {
    using Act = bf16;
    static int64_t panel_bytes(const kv_linear& l) { return ShiftedWeights::panel_bytes(l); }

    template <int ROWS, int COUNT, class F>
    static KV_INLINE void multiply(const kv_linear& l, Halves halves, F fetch, Rows<bf16> rows, Tile<ROWS, COUNT>& acc) {
        Words w[COUNT];
        int k = 0;
        for (; k + 1 < l.in; k += 2, halves.advance()) {
            fetch();
            for (int h = 0; h < COUNT; ++h) w[h] = load_words(halves[h]);
            for (int m = 0; m < ROWS; ++m) {
                const uint32_t pair = load_pair(rows[m] + k);
                for (int h = 0; h < COUNT; ++h) acc[m][h] = dot_pairs(acc[m][h], w[h], pair);
            }
        }
        if (k < l.in)
            for (int m = 0; m < ROWS; ++m) {
                const uint32_t pair = rows[m][k].bits;
                for (int h = 0; h < COUNT; ++h) acc[m][h] = dot_pairs(acc[m][h], load_words(halves[h]), pair);
            }
    }
};
#endif

template <class T>
constexpr int32_t dtype_of() {
    return sizeof(T) == 4 ? KV_F32 : KV_BF16;
}

// The results of a product: [rows][out], or [rows][out / 2] with a gate. stride: numbers from one row to the next.
struct Output {
    void* y;
    int32_t dtype;
    int64_t stride;
    kv_gate gate = {};  // of paired weights

    KV_INLINE void put(int row, int column, Lanes a, int count) const {
        if (count <= 0) return;
        const int64_t at = row * stride + column;
        if (dtype == KV_F32)
            write(static_cast<float*>(y) + at, a, std::min(count, LANES));
        else
            write(static_cast<bf16*>(y) + at, a, std::min(count, LANES));
    }
};

KV_INLINE Lanes gated(const kv_gate& gate, Lanes a, Lanes b) {
    if (gate.kind == KV_SILU_GATE) return silu(a) * b;
    const Lanes limit = splat(gate.limit);
    a = min(a, limit);
    b = max(min(b, limit), zeros() - limit);
    return a / (splat(1.0f) + exp(splat(-gate.alpha) * a)) * (b + splat(1.0f));
}

inline int num_panels(const kv_linear& l) { return l.is_paired ? ceil_div(l.out / 2, LANES) : ceil_div(l.out, PANEL); }

// Results of rows [row, row + num_rows) and one panel. sums: [num_rows][32].
inline void put(const kv_linear& l, const Output& output, int panel, int row, int num_rows, const float* sums) {
    const int half = l.out / 2;
    const int first = l.is_paired ? panel * LANES : panel * PANEL;
    const int second = l.is_paired ? half + first : first + LANES;
    const int count0 = (l.is_paired ? half : l.out) - first, count1 = l.out - second;
    Lanes bias0 = zeros(), bias1 = zeros();
    if (l.bias) {
        bias0 = load_some(l.bias + first, std::min(count0, LANES));
        bias1 = load_some(l.bias + second, std::clamp(count1, 0, LANES));
    }
    for (int m = 0; m < num_rows; ++m, sums += PANEL) {
        const Lanes a = load(sums) + bias0, b = load(sums + LANES) + bias1;
        if (output.gate.kind != KV_NO_GATE) {
            output.put(row + m, first, gated(output.gate, a, b), count0);
        } else {
            output.put(row + m, first, a, count0);
            output.put(row + m, second, b, count1);
        }
    }
}

// sums: [rows][32], 16 of each half; one row may have more than two halves. is_first: they are set, not added to.
template <class Weights, int ROWS, int COUNT, class F>
__attribute__((noinline)) void multiply_tile(const kv_linear& l, Halves halves, F fetch, Rows<typename Weights::Act> rows,
                                             float* sums, bool is_first) {
    Tile<ROWS, COUNT> acc;
    for (int m = 0; m < ROWS; ++m)
        for (int h = 0; h < COUNT; ++h) acc[m][h] = is_first ? zeros() : load(sums + m * PANEL + h * LANES);
    Weights::template multiply<ROWS, COUNT>(l, halves, fetch, rows, acc);
    Tile<ROWS, COUNT> results;  // a copy: clang would keep acc in memory during the product, because of the loop over it below
    for (int m = 0; m < ROWS; ++m)
        for (int h = 0; h < COUNT; ++h) results[m][h] = acc[m][h];
    for (int m = 0; m < ROWS; ++m)
        for (int h = 0; h < COUNT; ++h) store(sums + m * PANEL + h * LANES, results[m][h]);
}

// Several tiles take a panel in slices of this many inputs, which stay in the cache from one tile to the next.
constexpr int SLICE_INPUTS = 256;
// Up to this many tiles of rows take slices; more take whole panels.
constexpr int MOST_SLICED = TILE_HALVES == 2 ? 4 : 16;

// One panel by `num_rows` rows from `row` on, in tiles of nearly equal size: up to MOST rows by COUNT halves of the panel.
// With two tiles or more, each of the first two fetches half of the next slice while it computes on this one, so that memory
// is busy all the time.
template <class Weights, int MOST, int COUNT>
void multiply_in_tiles(const kv_linear& l, int panel_index, const char* panel, int64_t panel_bytes,
                       Rows<typename Weights::Act> rows, const Output& output, int row, int num_rows) {
    const int parts = ceil_div(num_rows, MOST), tiles = parts * (2 / COUNT);  // parts of the rows
    const int sums_per_row = Weights::sums_per_row(l);
    const bool is_sliced = Weights::IS_SLICED && tiles > 1 && parts <= MOST_SLICED;
    const int slices = is_sliced ? ceil_div(l.in, SLICE_INPUTS) : 1;
    alignas(CACHE_LINE) float sums[MOST_SLICED * MOST * PANEL];
    static constexpr auto functions = for_rows<MOST>([]<int ROWS>() { return &multiply_tile<Weights, ROWS, COUNT, Fetch>; });
    kv_linear slice = l;
    for (int s = 0, from = 0; s < slices; ++s, from += slice.in) {
        slice.in = s + 1 < slices ? l.in / slices / 2 * 2 : l.in - from;
        int64_t bytes = panel_bytes;
        if constexpr (Weights::IS_SLICED)
            if (slices > 1) bytes = Weights::panel_bytes(slice);
        for (int t = 0; t < tiles; ++t) {
            const int part = t / (2 / COUNT), half = t % (2 / COUNT);
            const int lo = num_rows * part / parts, hi = num_rows * (part + 1) / parts;
            const Fetch fetch = tiles == 1 ? Fetch{panel + LINES_AHEAD * CACHE_LINE, 2 * CACHE_LINE}
                                           : Fetch{panel + bytes + (t == 1 ? bytes / 2 : 0), CACHE_LINE};
            Rows<typename Weights::Act> own = rows.from(row + lo, sums_per_row);
            own.x += from;
            float* own_sums = sums + (is_sliced ? lo * PANEL : 0);
            functions[hi - lo - 1](slice, {panel + half * CACHE_LINE, panel_bytes, 2 * panel_index + half}, fetch, own,
                                   own_sums + half * LANES, s == 0);
            if (s + 1 == slices && half + COUNT == 2) put(l, output, panel_index, row + lo, hi - lo, own_sums);
        }
        panel += bytes;
    }
}

template <class Weights>
void multiply_panel(const kv_linear& l, int panel_index, const char* panel, int64_t panel_bytes,
                    Rows<typename Weights::Act> rows, const Output& output, int row, int num_rows) {
    if constexpr (Weights::HALVES == 1 && FEW_ROWS > 0)
        if (num_rows <= FEW_ROWS)
            return multiply_in_tiles<Weights, FEW_ROWS, 2>(l, panel_index, panel, panel_bytes, rows, output, row, num_rows);
    multiply_in_tiles<Weights, Weights::ROWS, Weights::HALVES>(l, panel_index, panel, panel_bytes, rows, output, row, num_rows);
}

// Two panels by one row. Processors with AVX2 read them as two streams, and prefetch more of two streams than of one.
constexpr bool TAKES_TWO_PANELS = VECTOR_BYTES == 32;
template <class Weights>
void multiply_two_panels(const kv_linear& l, int panel_index, const char* panel, int64_t panel_bytes,
                         Rows<typename Weights::Act> rows, const Output& output) {
    alignas(CACHE_LINE) float sums[2 * PANEL];
    multiply_tile<Weights, 1, 4>(l, {panel, panel_bytes, 2 * panel_index}, NoFetch{}, rows, sums, true);
    put(l, output, panel_index, 0, 1, sums);
    put(l, output, panel_index + 1, 0, 1, sums + PANEL);
}

// Panels by blocks of rows, shared out among the team.
template <class Weights>
void multiply(Worker& w, const kv_linear& l, Rows<typename Weights::Act> rows, const Output& output, int num_rows) {
    constexpr int BLOCK = 16 * MAX_ROWS, CHUNKS_PER_MEMBER = 8;
    const int panels = num_panels(l), blocks = ceil_div(num_rows, BLOCK);
    const int wanted = CHUNKS_PER_MEMBER * w.team.size();
    const bool takes_two = TAKES_TWO_PANELS && num_rows == 1 && panels >= 4 * w.team.size();
    const int unit = takes_two ? 2 : 1, per_chunk = blocks > 1 ? 1 : std::max(panels / wanted / unit * unit, unit);
    const int chunks = ceil_div(panels, per_chunk);
    const int64_t bytes = Weights::panel_bytes(l);
    const char* weight = static_cast<const char*>(l.weight);
    w.for_each(chunks * blocks, [&](int task) {
        const int block = task % blocks, first = task / blocks * per_chunk;
        const int lo = num_rows * block / blocks, hi = num_rows * (block + 1) / blocks;
        const int end = std::min(first + per_chunk, panels);
        int p = first;
        if constexpr (TAKES_TWO_PANELS)
            for (; takes_two && p + 2 <= end; p += 2) multiply_two_panels<Weights>(l, p, weight + p * bytes, bytes, rows, output);
        for (; p < end; ++p) multiply_panel<Weights>(l, p, weight + p * bytes, bytes, rows, output, lo, hi - lo);
    });
}

// Bytes of a panel that is expanded to float32.
inline int64_t expanded_bytes(const kv_linear& l) { return int64_t(l.in + 1) * PANEL * 4; }

// Called outside of run().
inline void reserve_expanded(kv_team& team, const kv_linear& l) {
    team.buffers[kv_team::PARTIAL].reserve(team.size() * expanded_bytes(l));
}

// Many rows: each panel is turned into one of `Weights` once, in the member's own part of a buffer.
template <class From, class Weights>
void multiply_expanded(Worker& w, const kv_linear& l, int64_t panel_bytes, Rows<typename Weights::Act> rows,
                       const Output& output, int num_rows) {
    char* own = w.scratch<char>(kv_team::PARTIAL) + (w.own_bytes ? 0 : expanded_bytes(l) * w.index);
    w.for_each(num_panels(l), [&](int p) {
        From::expand(l, static_cast<const char*>(l.weight) + p * panel_bytes, own);
        multiply_panel<Weights>(l, p, own, 0, rows, output, 0, num_rows);
    });
}

// Products of many rows are bound by arithmetic, and every tile of whole panels would convert each weight again. Tiles of half
// panels take the same time either way.
constexpr bool is_expanded(int num_rows) { return TILE_HALVES == 2 && num_rows >= MOST_SLICED * MAX_ROWS; }

// Called outside of run(), before `product`.
inline void reserve_product(kv_team& team, const kv_linear& l, int num_rows) {
    if (l.format == KV_LINEAR_BF16 && is_expanded(num_rows)) reserve_expanded(team, l);
}

inline void product(Worker& w, const kv_linear& l, const float* x, int64_t stride, const Output& output, int num_rows) {
    if (l.format == KV_LINEAR_F32)
        multiply<Float32Weights>(w, l, {x, stride}, output, num_rows);
    else if (is_expanded(num_rows))
        multiply_expanded<ShiftedWeights, Float32Weights>(w, l, ShiftedWeights::panel_bytes(l), {x, stride}, output,
                                                          num_rows);
    else
        multiply<ShiftedWeights>(w, l, {x, stride}, output, num_rows);
}

#if defined(KV_HAS_BF16_DOT) && !defined(KV_HAS_TILES)
inline void product(Worker& w, const kv_linear& l, const bf16* x, int64_t stride, const Output& output, int num_rows) {
    multiply<PairedWeights>(w, l, {x, stride}, output, num_rows);
}
#endif

}  // namespace KV_VARIANT
