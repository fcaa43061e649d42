// The terms of LoRA adapters, added to the outputs of a linear layer. A row's result does not depend on the other rows.
#pragma once
#include "linear.h"

namespace KV_VARIANT {

// Registers hold INNER_ROWS * INNER_RANKS sums, and the numbers that are multiplied.
constexpr int INNER_ROWS = VECTOR_BYTES == 64 ? 4 : 2, INNER_RANKS = VECTOR_BYTES == 64 ? 4 : 1;
constexpr int OUTER_ROWS = VECTOR_BYTES == 64 ? 8 : 3;
constexpr int ROW_BLOCK = 64;       // rows of a task
constexpr int PANELS_PER_TASK = 8, RANKS_PER_TASK = 8;

// One step's terms, and memory for their inner products, which lie one after the other.
struct LoraTerms {
    const kv_lora_term* terms;
    int count;
    const kv_lora_run* runs;
    float* inner = nullptr;

    int rows(const kv_lora_term& t) const { return runs[t.run].stop - runs[t.run].start; }
    int blocks(const kv_lora_term& t) const { return ceil_div(rows(t), ROW_BLOCK); }

    int64_t inner_numbers() const {
        int64_t numbers = 0;
        for (int i = 0; i < count; ++i) numbers += int64_t(rows(terms[i])) * terms[i].rank;
        return numbers;
    }

    // Calls f(term, its inner products, first row, rows, unit) for each block of rows by each of units(term) units of each term,
    // shared out among the team.
    template <class Units, class F>
    void for_each(Worker& w, const Units& units, const F& f) const {
        int tasks = 0;
        for (int i = 0; i < count; ++i) tasks += units(terms[i]) * blocks(terms[i]);
        w.for_each(tasks, [&](int task) {
            const kv_lora_term* t = terms;
            float* own = inner;
            for (; task >= units(*t) * blocks(*t); ++t) {
                task -= units(*t) * blocks(*t);
                own += int64_t(rows(*t)) * t->rank;
            }
            const int lo = task % blocks(*t) * ROW_BLOCK;
            f(*t, own + int64_t(lo) * t->rank, runs[t->run].start + lo, std::min(rows(*t) - lo, ROW_BLOCK), task / blocks(*t));
        });
    }
};

// inner[m][r] = scale * (row m of x) . (row r of a), for ROWS by RANKS of them.
template <class W, class T, int ROWS, int RANKS>
void inner_tile(const kv_lora_term& t, const W* a, const T* x, int64_t stride, float* inner) {
    Lanes sums[ROWS][RANKS];
    for (int m = 0; m < ROWS; ++m)
        for (int r = 0; r < RANKS; ++r) sums[m][r] = zeros();
    int begin = 0;
#ifdef KV_HAS_BF16_DOT
    if constexpr (sizeof(W) == 2 && sizeof(T) == 2)
        for (; begin + 2 * LANES <= t.in; begin += 2 * LANES) {
            Words w[RANKS];
            for (int r = 0; r < RANKS; ++r) {
                __builtin_prefetch(a + int64_t(r + RANKS) * t.in + begin);
                w[r] = load_words(a + int64_t(r) * t.in + begin);
            }
            for (int m = 0; m < ROWS; ++m) {
                const Words v = load_words(x + m * stride + begin);
                for (int r = 0; r < RANKS; ++r) sums[m][r] = dot_words(sums[m][r], v, w[r]);
            }
        }
#endif
    for_lanes(t.in - begin, [&](int i, int count) {
        const int k = begin + i;
        Lanes w[RANKS];
        for (int r = 0; r < RANKS; ++r) w[r] = read(a + int64_t(r) * t.in + k, count);
        for (int m = 0; m < ROWS; ++m) {
            const Lanes v = read(x + m * stride + k, count);
            for (int r = 0; r < RANKS; ++r) sums[m][r] = multiply_add(v, w[r], sums[m][r]);
        }
    });
    for (int m = 0; m < ROWS; ++m)
        for (int r = 0; r < RANKS; ++r) inner[m * t.rank + r] = t.scale * sum(sums[m][r]);
}

template <class W, class T, int RANKS>
void inner_rows(const kv_lora_term& t, const W* a, const T* x, int64_t stride, float* inner, int rows) {
    int m = 0;
    for (; m + INNER_ROWS <= rows; m += INNER_ROWS)
        inner_tile<W, T, INNER_ROWS, RANKS>(t, a, x + m * stride, stride, inner + m * t.rank);
    for (; m < rows; ++m) inner_tile<W, T, 1, RANKS>(t, a, x + m * stride, stride, inner + m * t.rank);
}

// y[m][...] += the inner products of row m times one panel of b, [rank][32].
template <class T, class Y, int ROWS>
void outer_tile(const kv_lora_term& t, const T* panel, const float* inner, Y* y, int64_t stride, int columns) {
    Lanes sums[ROWS][2];
    for (int m = 0; m < ROWS; ++m) sums[m][0] = sums[m][1] = zeros();
    for (int r = 0; r < t.rank; ++r) {
        __builtin_prefetch(panel + (r + t.rank) * PANEL);
        const Lanes w0 = load(panel + r * PANEL), w1 = load(panel + r * PANEL + LANES);
        for (int m = 0; m < ROWS; ++m) {
            sums[m][0] = multiply_add(inner[m * t.rank + r], w0, sums[m][0]);
            sums[m][1] = multiply_add(inner[m * t.rank + r], w1, sums[m][1]);
        }
    }
    for (int m = 0; m < ROWS; ++m)
        for (int half = 0; half < 2; ++half) {
            const int count = std::min(columns - half * LANES, LANES);
            Y* to = y + m * stride + half * LANES;
            if (count > 0) write(to, read(to, count) + sums[m][half], count);
        }
}

template <class T, class Y>
void outer_rows(const kv_lora_term& t, const T* panel, const float* inner, Y* y, int64_t stride, int columns, int rows) {
    int m = 0;
    for (; m + OUTER_ROWS <= rows; m += OUTER_ROWS)
        outer_tile<T, Y, OUTER_ROWS>(t, panel, inner + m * t.rank, y + m * stride, stride, columns);
    if constexpr (OUTER_ROWS > 4)
        for (; m + 4 <= rows; m += 4) outer_tile<T, Y, 4>(t, panel, inner + m * t.rank, y + m * stride, stride, columns);
    for (; m + 2 <= rows; m += 2) outer_tile<T, Y, 2>(t, panel, inner + m * t.rank, y + m * stride, stride, columns);
    if (m < rows) outer_tile<T, Y, 1>(t, panel, inner + m * t.rank, y + m * stride, stride, columns);
}

// W: the type of all a and b.
template <class W, class T, class Y>
void add_lora(Worker& w, const LoraTerms& all, const T* x, int64_t x_stride, Y* y, int64_t y_stride) {
    const auto groups = [](const kv_lora_term& t) { return ceil_div(t.rank, RANKS_PER_TASK); };
    all.for_each(w, groups, [&](const kv_lora_term& t, float* inner, int row, int rows, int group) {
        const T* from = x + row * x_stride;
        const W* a = static_cast<const W*>(t.a);
        int rank = group * RANKS_PER_TASK;
        const int stop = std::min(rank + RANKS_PER_TASK, t.rank);
        for (; rank + INNER_RANKS <= stop; rank += INNER_RANKS)
            inner_rows<W, T, INNER_RANKS>(t, a + int64_t(rank) * t.in, from, x_stride, inner + rank, rows);
        for (; rank < stop; ++rank)
            inner_rows<W, T, 1>(t, a + int64_t(rank) * t.in, from, x_stride, inner + rank, rows);
    });
    const auto chunks = [](const kv_lora_term& t) { return ceil_div(t.out, PANEL * PANELS_PER_TASK); };
    all.for_each(w, chunks, [&](const kv_lora_term& t, const float* inner, int row, int rows, int chunk) {
        const int first = chunk * PANELS_PER_TASK, end = std::min(first + PANELS_PER_TASK, ceil_div(t.out, PANEL));
        for (int p = first; p < end; ++p)
            outer_rows(t, static_cast<const W*>(t.b) + int64_t(p) * t.rank * PANEL, inner,
                       y + row * y_stride + t.first + p * PANEL, y_stride, t.out - p * PANEL, rows);
    });
}

}  // namespace KV_VARIANT
