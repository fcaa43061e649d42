// Attention of some rows to one partition of a context, whose K and V are in panels.
#pragma once
#include "attention_panels.h"

namespace KV_VARIANT::attention {

// Whether matrix units multiply rows of this type, with panels of bfloat16; and the most rows that are multiplied at once.
#ifdef KV_HAS_TILES
template <class Act>
constexpr bool ON_TILES = sizeof(Act) == 2;
template <class Act>
constexpr int TILE_ROWS = ON_TILES<Act> ? TILED_ROWS : MAX_ROWS;
#else
template <class Act>
constexpr bool ON_TILES = false;
template <class Act>
constexpr int TILE_ROWS = MAX_ROWS;
#endif

// sums[m] += the products of row m's next numbers with the next word of each of the panel's columns, from some half on.
template <int ROWS, int COUNT>
KV_INLINE void add_products(Tile<ROWS, COUNT>& sums, const uint32_t* panel, const float* rows, int64_t stride, float) {
    Lanes w[COUNT];
    for (int h = 0; h < COUNT; ++h) w[h] = as_floats(load_words(panel + h * LANES));
    add_outer<ROWS>({rows, stride}, 0, w, sums);
}
template <int ROWS, int COUNT>
KV_INLINE void add_products(Tile<ROWS, COUNT>& sums, const uint32_t* panel, const float* rows, int64_t stride, bf16) {
    const Halves halves{reinterpret_cast<const char*>(panel), 0, 0};
    ShiftedWeights::add<false>(halves, {rows, stride}, 0, sums);
    keep_loads_here();
    ShiftedWeights::add<true>(halves, {rows, stride}, 1, sums);
}
#ifdef KV_HAS_BF16_DOT
template <int ROWS, int COUNT>
KV_INLINE void add_products(Tile<ROWS, COUNT>& sums, const uint32_t* panel, const bf16* rows, int64_t stride, bf16) {
    Words w[COUNT];
    for (int h = 0; h < COUNT; ++h) w[h] = load_words(panel + h * LANES);
    for (int m = 0; m < ROWS; ++m) {
        const uint32_t pair = load_pair(rows + m * stride);
        for (int h = 0; h < COUNT; ++h) sums[m][h] = dot_pairs(sums[m][h], w[h], pair);
    }
}
#endif

// out[m][0..32) = the product of row m's `words` words with the panel's.
template <class Act, class Number, int ROWS>
__attribute__((noinline)) void multiply_tile(const uint32_t* panel, int words, const Act* rows, int64_t stride, float* out,
                                             int64_t out_stride) {
    constexpr int COUNT = halves_of(ROWS);
    for (int half = 0; half < 2; half += COUNT, panel += LANES, out += LANES) {
        Tile<ROWS, COUNT> sums;
        clear<ROWS, COUNT>(sums);
        for (int w = 0; w < words; ++w)
            add_products<ROWS>(sums, panel + w * PANEL, rows + w * PER_WORD<Number>, stride, Number{});
        for (int m = 0; m < ROWS; ++m)
            for (int h = 0; h < COUNT; ++h) store(out + m * out_stride + h * LANES, sums[m][h]);
    }
}

template <class Act>
using MultiplyTile = decltype(&multiply_tile<Act, Act, 1>);

#ifdef KV_HAS_TILES
// out[m][0..32) by matrix units, whose shapes are set for the rows. Words up to the next multiple of 16 are read.
template <bool HAS_TWO>
__attribute__((noinline)) void multiply_by_tiles(const uint32_t* panel, int words, const bf16* rows, int64_t stride, float* out,
                                                 int64_t out_stride) {
    NoFetch none;
    tiles::clear_sums<HAS_TWO>();
    tiles::add_steps<tiles::BF16, HAS_TWO>(reinterpret_cast<const char*>(rows), stride * 2, reinterpret_cast<const char*>(panel),
                                           ceil_div(words, tiles::UNITS), none);
    tiles::store_sums<HAS_TWO>(reinterpret_cast<char*>(out), out_stride * 4);
}
#endif

// The function above for `num_rows` rows.
template <class Act, class Number>
MultiplyTile<Act> tile_function(int num_rows) {
#ifdef KV_HAS_TILES
    if constexpr (ON_TILES<Act>) return num_rows > tiles::ROWS ? &multiply_by_tiles<true> : &multiply_by_tiles<false>;
    else
#endif
    {
        static constexpr auto functions = for_rows<MAX_ROWS>([]<int ROWS>() { return &multiply_tile<Act, Number, ROWS>; });
        return functions[num_rows - 1];
    }
}

// The products of rows of weights with values in panels.
template <class Number, class Act>
struct PanelValues {
    const uint32_t* panels;

    // out[m][0..dim): of row m's weights of tokens [begin, end).
    void multiply(int num_rows, const Act* weights, int begin, int end, int dim, float* out, int64_t out_stride,
                  Ahead& ahead) const {
        constexpr int UNIT = PER_WORD<Number>;
        const auto tile = tile_function<Act, Number>(num_rows);
        for (int d = 0; d < dim; d += PANEL) {
            ahead.fetch();
            ahead.fetch();
            tile(panels + (d * PARTITION + begin * PANEL) / UNIT, (end - begin + UNIT - 1) / UNIT, weights + begin, PARTITION,
                 out + d, out_stride);
        }
    }
};

template <size_t... I>
KV_INLINE void store_part_interleaved(float* out, FloatPart even, FloatPart odd, std::index_sequence<I...>) {
    *(FloatPart*)out = __builtin_shufflevector(even, odd, (I / 2 + I % 2 * PART_LANES)...);
    *(FloatPart*)(out + PART_LANES) = __builtin_shufflevector(even, odd, ((PART_LANES + I) / 2 + I % 2 * PART_LANES)...);
}
// Writes 32 numbers interleaved: one of `even`, one of `odd`.
KV_INLINE void store_interleaved(float* out, Lanes even, Lanes odd) {
    KV_PARTS store_part_interleaved(out + 2 * p * PART_LANES, even.v[p], odd.v[p], std::make_index_sequence<PART_LANES>{});
}

// Whether values come straight from the blocks: if one tile takes all rows, panels would be written to be read once. Matrix
// units need panels.
template <class Act>
bool reads_blocks(int rows, int dim) {
    return !ON_TILES<Act> && rows <= MAX_ROWS && dim % (2 * PANEL) == 0;
}

// The products of rows of weights with values in blocks: the same sums in the same order as PanelValues.
template <class T, class Act>
struct BlockValues {
    const T* v;
    const Tokens& tokens;

    // Panels at a time: enough sums to hide the latency of multiply-adds, and no more than registers hold.
    static constexpr int at_once(int rows) { return 4 * rows * PARTS <= SUM_REGISTERS ? 2 : 1; }

    void multiply(int num_rows, const Act* weights, int begin, int end, int dim, float* out, int64_t out_stride,
                  Ahead& ahead) const {
        static constexpr auto functions = for_rows<MAX_ROWS>([]<int ROWS>() { return &BlockValues::multiply_tile<ROWS>; });
        for (int d = 0; d < dim; d += at_once(num_rows) * PANEL)
            functions[num_rows - 1](*this, weights, begin, end, d, out + d, out_stride, ahead);
    }

  private:
    // Whether 32 numbers are added as sixteen pairs: those at even and those at odd places.
    static constexpr bool IN_PAIRS = sizeof(T) == 2 || (sizeof(T) == 1 && VECTOR_BYTES == 64);
    static constexpr int UNIT = PER_WORD<Act>;  // tokens at a time
    static constexpr T NONE[PANEL] = {};

    template <int ROWS>
    __attribute__((noinline)) static void multiply_tile(const BlockValues& from, const Act* weights, int begin, int end, int d,
                                                        float* out, int64_t out_stride, Ahead& ahead) {
        constexpr int COUNT = halves_of(ROWS), ALL = at_once(ROWS) * COUNT;
        static_assert(COUNT == 2 || ALL == 1);
        Tile<ROWS, ALL> sums;
        from.template add_all<COUNT, 0>(sums, weights, begin, end, d, ahead);
        if constexpr (COUNT == 2) {
            for (int m = 0; m < ROWS; ++m)
                for (int i = 0; i < ALL; i += 2) put(sums[m][i], sums[m][i + 1], out + m * out_stride + i / 2 * PANEL);
        } else {
            alignas(64) float first[ROWS * LANES];
            for (int m = 0; m < ROWS; ++m) store(first + m * LANES, sums[m][0]);
            from.template add_all<COUNT, 1>(sums, weights, begin, end, d, ahead);
            for (int m = 0; m < ROWS; ++m) put(load(first + m * LANES), sums[m][0], out + m * out_stride);
        }
    }

    // sums: of tokens [begin, end), of COUNT halves of each panel from HALF on.
    template <int COUNT, int HALF, int ROWS, int ALL>
    KV_INLINE void add_all(Tile<ROWS, ALL>& sums, const Act* weights, int begin, int end, int d, Ahead& ahead) const {
        clear<ROWS, ALL>(sums);
        for (int t = std::max(begin, tokens.begin / UNIT * UNIT); t < end;) {
            ahead.fetch();
            for (const int stop = std::min(t + LANES, end); t < stop; t += UNIT)
                add<COUNT, HALF, ROWS, ALL>(sums, t, end, d, weights + t);
        }
    }

    // Thirty-two results, of both halves.
    static KV_INLINE void put(Lanes first, Lanes second, float* out) {
        if (sizeof(Act) == 4 && IN_PAIRS)
            store_interleaved(out, first, second);
        else
            store(out, first), store(out + LANES, second);
    }

    // sums[m] += the products of row m's weights from `weights` on with the numbers of UNIT tokens. A half of a panel is the
    // numbers at even or odd places, or sixteen after the other.
    template <int COUNT, int HALF, int ROWS, int ALL>
    KV_INLINE void add(Tile<ROWS, ALL>& sums, int t, int, int d, const float* weights) const {
        const T* x = v + tokens.at[t] + d;
        Lanes w[ALL];
        for (int i = 0; i < ALL; ++i) {
            const int h = HALF + i % COUNT;
            if constexpr (IN_PAIRS) {
                const Words pairs = words_of(x + i / COUNT * PANEL, bf16{});
                w[i] = h ? ShiftedWeights::odd(pairs) : ShiftedWeights::even(pairs);
            } else {
                w[i] = load(x + i / COUNT * PANEL + h * LANES);
            }
        }
        add_outer<ROWS>({weights, PARTITION}, 0, w, sums);
    }
#ifdef KV_HAS_BF16_DOT
    template <int COUNT, int HALF, int ROWS, int ALL>
    KV_INLINE void add(Tile<ROWS, ALL>& sums, int t, int end, int d, const bf16* weights) const {
        const T* x = t < tokens.begin ? nullptr : v + tokens.at[t] + d;
        const T* y = t + 1 < end ? v + tokens.at[t + 1] + d : nullptr;
        Words w[ALL];
        for (int i = 0; i < ALL; i += COUNT) {
            Words pairs[2];
            pair_words(x ? x + i / COUNT * PANEL : NONE, y ? y + i / COUNT * PANEL : NONE, pairs);
            for (int h = 0; h < COUNT; ++h) w[i + h] = pairs[HALF + h];
        }
        for (int m = 0; m < ROWS; ++m) {
            const uint32_t pair = load_pair(weights + m * PARTITION);
            for (int i = 0; i < ALL; ++i) sums[m][i] = dot_pairs(sums[m][i], w[i], pair);
        }
    }
#endif
};

template <size_t... I>
KV_INLINE FloatPart swap_lanes(FloatPart a, size_t step, std::index_sequence<I...>) {
    switch (step) {
        case 8: return __builtin_shufflevector(a, a, ((I ^ 8) % PART_LANES)...);
        case 4: return __builtin_shufflevector(a, a, ((I ^ 4) % PART_LANES)...);
        case 2: return __builtin_shufflevector(a, a, (I ^ 2)...);
        default: return __builtin_shufflevector(a, a, (I ^ 1)...);
    }
}
// One number from sixteen; join(a, b) combines two vectors.
template <class Join>
KV_INLINE float reduce(Lanes lanes, const Join& join) {
    FloatPart a = lanes.v[0];
    for (int p = 1; p < PARTS; ++p) a = join(a, lanes.v[p]);
#pragma GCC unroll 4
    for (size_t step = PART_LANES / 2; step; step /= 2)
        a = join(a, swap_lanes(a, step, std::make_index_sequence<PART_LANES>{}));
    return a[0];
}

// Lanes [first, end) of `a`; the others are minus infinity.
KV_INLINE Lanes keep_between(Lanes a, int first, int end) {
    KV_PARTS {
        const IntPart lane = *(const IntPart*)(LANE_NUMBERS + p * PART_LANES);
        a.v[p] = ((lane >= first) & (lane < end)) ? a.v[p] : splat_part(-__builtin_inff());
    }
    return a;
}

// 2^NO_POWER is 0 for `times_power`.
constexpr float NO_POWER = VECTOR_BYTES == 64 ? -200.0f : -127.0f;

// y * 2^n for whole n from NO_POWER to 127.
KV_INLINE Lanes times_power(Lanes y, Lanes n) {
#if defined(__AVX512F__)
    y.v[0] = (FloatPart)_mm512_scalef_ps((__m512)y.v[0], (__m512)n.v[0]);
#else
    // Adding 1.5 * 2^23 leaves an integer in the low bits, and 127 more makes it a float's exponent.
    KV_PARTS y.v[p] *= (FloatPart)((WordPart)(n.v[p] + (12582912.0f + 127.0f)) << 23);
#endif
    return y;
}

// 2^x for x up to 127; 0 far below 0. For Act float to within 2 units in the last place; for bf16, which rounds by 2^-9, to
// within a 700th of that.
template <class Act>
KV_INLINE Lanes exp2(Lanes x) {
    const auto power = [](Lanes b, float highest, auto... others) __attribute__((always_inline)) {
        Lanes y = splat(highest);
        ((y = multiply_add(y, b, splat(others))), ...);
        return y;
    };
    Lanes n;
    KV_PARTS {
        const FloatPart low = splat_part(NO_POWER);
        x.v[p] = low > x.v[p] ? low : x.v[p];
        n.v[p] = x.v[p] + 12582912.0f - 12582912.0f;  // rounds to a whole number
    }
    const Lanes b = x - n;
    if constexpr (sizeof(Act) == 4)
        return times_power(power(b, 1.5353362e-4f, 1.3398874e-3f, 9.6184373e-3f, 5.5503324e-2f, 2.4022648e-1f,
                                 6.9314720e-1f, 1.0f), n);
    return times_power(power(b, 9.5701017e-3f, 5.5917860e-2f, 2.4024745e-1f, 6.9312181e-1f, 9.9999926e-1f), n);
}

// tanh(scores * scale) of scores [first, end), which begin at whole vectors.
KV_INLINE void take_tanh(float* scores, int first, int end, float scale) {
    // tanh(x) = 2 / (1 + e^-2x) - 1
    for (int t = first; t < end; t += LANES)
        store(scores + t, splat(2.0f) / (splat(1.0f) + exp(load(scores + t) * splat(-2 * scale))) - splat(1.0f));
}

// The largest of scores [from, seen), at least one, lane by lane. Those beside them in the same vectors become minus infinity.
KV_INLINE Lanes largest_of(float* scores, int from, int seen) {
    const int first = from / LANES * LANES, last = (seen - 1) / LANES * LANES;
    if (from > first) store(scores + first, keep_between(load(scores + first), from - first, LANES));
    store(scores + last, keep_between(load(scores + last), 0, seen - last));
    Lanes largest = load(scores + first);
    for (int t = first + LANES; t < seen; t += LANES) largest = max(largest, load(scores + t));
    return largest;
}

// weights = 2^(score * scale - top) of scores that `largest_of` was called with; zero outside of [from, seen). They are written
// from `begin` on, which begins a panel and is at most `from`. Returns their sum, lane by lane.
template <class Act>
KV_INLINE Lanes weigh(const float* scores, int begin, int from, int seen, int padded, float scale, float top, Act* weights) {
    const int first = from / LANES * LANES;
    Lanes sums = zeros();
    int t = begin;
    for (; t < first; t += LANES) store(weights + t, zeros());
    for (; t < seen; t += LANES) {
        const Lanes a = exp2<Act>(multiply_add(scale, load(scores + t), splat(-top)));
        sums = sums + a;
        store(weights + t, a);
    }
    for (; t < padded; t += LANES) store(weights + t, zeros());
    return sums;
}

// The results of one partition for some rows: [rows][width], to be divided by `total`. top: the highest score.
struct Partial {
    float* results;
    float* top;
    float* total;
};

// A score is scale * product, or cap * tanh(scale * product) if cap is not 0. `scale`, or `cap` if there is one, includes the
// factor log2(e), because weights are powers of 2.
struct Scores {
    float scale, cap;
};

// Highest score of rows that attend to nothing: finite, because minus infinity less itself is NaN, but without weight.
constexpr float NO_TOP = -1e30f;

// Attention of up to TILE_ROWS<Act> rows to a partition, whose keys are in panels of Number. Row m attends to tokens
// [from[m], seen[m]), perhaps to none. Neither end is before that of row m - 1.
template <class Number, class Act, class Values>
void attend_tile(const uint32_t* keys, const Values& values, int dim, const Act* queries, int64_t query_stride,
                 int num_rows, const int* from, const int* seen, Scores how, Ahead& ahead, Partial out, int width) {
    constexpr int ROWS = TILE_ROWS<Act>;
    alignas(64) float scores[ROWS * PARTITION];
    alignas(64) Act weights[ROWS * PARTITION];
#ifdef KV_HAS_TILES
    tiles::Shapes shapes;
    if (ON_TILES<Act>) shapes.set(num_rows);
#endif
    const auto multiply = tile_function<Act, Number>(num_rows);
    const int words = (dim + PER_WORD<Number> - 1) / PER_WORD<Number>;
    const int padded_words = round_up(dim, LANES * PER_WORD<Number>) / PER_WORD<Number>;
    const int most = seen[num_rows - 1], padded = round_up(most, ON_TILES<Act> ? PANEL : LANES);
    const int begin = from[0] / PANEL * PANEL;
    for (int t = begin; t < most; t += PANEL) {
        ahead.fetch();
        multiply(keys + t * padded_words, words, queries, query_stride, scores + t, PARTITION);
    }
    // One step for all rows at a time, because a row's steps wait for one another.
    Lanes lanes[ROWS];
    for (int m = 0; m < num_rows; ++m) {
        float* own = scores + m * PARTITION;
        if (how.cap != 0) take_tanh(own, from[m] / LANES * LANES, seen[m], how.scale);
        lanes[m] = from[m] < seen[m] ? largest_of(own, from[m], seen[m]) : splat(NO_TOP);
    }
    const float scale = how.cap != 0 ? how.cap : how.scale;
    for (int m = 0; m < num_rows; ++m)
        out.top[m] = reduce(lanes[m], [](FloatPart a, FloatPart b) { return a > b ? a : b; }) * scale;
    for (int m = 0; m < num_rows; ++m) {
        ahead.fetch();
        const int at = m * PARTITION;
        if (from[m] < seen[m])
            lanes[m] = weigh(scores + at, begin, from[m], seen[m], padded, scale, out.top[m], weights + at);
        else
            lanes[m] = weigh(scores + at, begin, padded, begin, padded, scale, 0, weights + at);
    }
    for (int m = 0; m < num_rows; ++m) out.total[m] = reduce(lanes[m], [](FloatPart a, FloatPart b) { return a + b; });
    values.multiply(num_rows, weights, begin, most, dim, out.results, width, ahead);
}

// Sets the results of rows [first, last) that have seen no partition yet.
inline void clear(Partial partial, int first, int last, int width) {
    std::fill(partial.top + first, partial.top + last, NO_TOP);
    std::fill(partial.total + first, partial.total + last, 0.0f);
    std::fill(partial.results + int64_t(first) * width, partial.results + int64_t(last) * width, 0.0f);
}

// Adds the results of a later partition, of rows [first, last), to those of earlier ones.
inline void merge(Partial into, Partial from, int first, int last, int width) {
    for (int row = first; row < last; row += LANES) {
        const int count = std::min(last - row, LANES);
        float keep[LANES], add[LANES];
        const Lanes old_top = load_some(into.top + row, count), new_top = load_some(from.top + row, count);
        const Lanes top = max(old_top, new_top);
        store(keep, exp2<float>(old_top - top));
        store(add, exp2<float>(new_top - top));
        const Lanes total = load_some(into.total + row, count) * load(keep);
        store_some(into.total + row, multiply_add(load_some(from.total + row, count), load(add), total), count);
        store_some(into.top + row, top, count);
        for (int i = 0; i < count; ++i) {
            float* x = into.results + int64_t(row + i) * width;
            const float* y = from.results + int64_t(row + i) * width;
            for (int d = 0; d < width; d += LANES)
                store(x + d, multiply_add(load(y + d), splat(add[i]), load(x + d) * splat(keep[i])));
        }
    }
}

}  // namespace KV_VARIANT::attention
