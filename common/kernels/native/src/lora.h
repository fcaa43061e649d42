// What LoRA adapters add to the outputs of a linear layer. A row's result does not depend on the other rows.
#pragma once
#include "linear.h"
#include "rows.h"

namespace KV_VARIANT {

// What registers hold: INNER_ROWS * INNER_RANKS sums, and the numbers that they are made of.
constexpr int INNER_ROWS = VECTOR_BYTES == 64 ? 4 : 2, INNER_RANKS = VECTOR_BYTES == 64 ? 4 : 1;
constexpr int OUTER_ROWS = VECTOR_BYTES == 64 ? 8 : 3;
constexpr int ROW_BLOCK = 64;       // rows of a task
constexpr int PANELS_PER_TASK = 8;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// One step's terms, and where each one's inner products lie.
struct LoraTerms {
    const kv_lora_term* terms;
    int count;
    const kv_lora_run* runs;
    float* inner;

    int rows(const kv_lora_term& t) const { return runs[t.run].stop - runs[t.run].start; }
    int blocks(const kv_lora_term& t) const { return ceil_div(rows(t), ROW_BLOCK); }

    // Calls f(term, its inner products, first row, rows, unit) for task number `task` among all units of all terms.
    template <class Units, class F>
    void task(int task, const Units& units, const F& f) const {
        float* own = inner;
        for (const kv_lora_term* t = terms;; ++t) {
            const int all = units(*t) * blocks(*t);
            if (task < all) {
                const int block = task % blocks(*t), lo = block * ROW_BLOCK;
                const int left = rows(*t) - lo;
                return f(*t, own + int64_t(lo) * t->rank, runs[t->run].start + lo, left < ROW_BLOCK ? left : ROW_BLOCK,
                         task / blocks(*t));
            }
            task -= all;
            own += int64_t(rows(*t)) * t->rank;
        }
    }
    template <class Units>
    int tasks(const Units& units) const {
        int all = 0;
        for (int i = 0; i < count; ++i) all += units(terms[i]) * blocks(terms[i]);
        return all;
    }
};

inline int64_t inner_numbers(const kv_lora_term* terms, int count, const kv_lora_run* runs) {
    int64_t numbers = 0;
    for (int i = 0; i < count; ++i) numbers += int64_t(runs[terms[i].run].stop - runs[terms[i].run].start) * terms[i].rank;
    return numbers;
}

// inner[m][r] = scale * (row m of x) . (row r of a), for ROWS by RANKS of them.
template <class T, int ROWS, int RANKS>
void inner_tile(const kv_lora_term& t, const T* a, const T* x, int64_t stride, float* inner) {
    Lanes sums[ROWS][RANKS];
    for (int m = 0; m < ROWS; ++m)
        for (int r = 0; r < RANKS; ++r) sums[m][r] = zeros();
    for_lanes(t.in, [&](int k, int count) {
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

template <class T, int RANKS>
void inner_rows(const kv_lora_term& t, const T* a, const T* x, int64_t stride, float* inner, int rows) {
    int m = 0;
    for (; m + INNER_ROWS <= rows; m += INNER_ROWS)
        inner_tile<T, INNER_ROWS, RANKS>(t, a, x + m * stride, stride, inner + m * t.rank);
    for (; m < rows; ++m) inner_tile<T, 1, RANKS>(t, a, x + m * stride, stride, inner + m * t.rank);
}

// y[m][...] += the inner products of row m times one panel of b, [rank][32].
template <class T, class Y, int ROWS>
void outer_tile(const kv_lora_term& t, const T* panel, const float* inner, Y* y, int64_t stride, int columns) {
    Lanes sums[ROWS][2];
    for (int m = 0; m < ROWS; ++m) sums[m][0] = sums[m][1] = zeros();
    for (int r = 0; r < t.rank; ++r) {
        const Lanes w0 = load(panel + r * PANEL), w1 = load(panel + r * PANEL + LANES);
        for (int m = 0; m < ROWS; ++m) {
            sums[m][0] = multiply_add(inner[m * t.rank + r], w0, sums[m][0]);
            sums[m][1] = multiply_add(inner[m * t.rank + r], w1, sums[m][1]);
        }
    }
    for (int m = 0; m < ROWS; ++m)
        for (int half = 0; half < 2; ++half) {
            const int count = columns - half * LANES < LANES ? columns - half * LANES : LANES;
            Y* to = y + m * stride + half * LANES;
            if (count > 0) write(to, read(to, count) + sums[m][half], count);
        }
}

template <class T, class Y>
void outer_rows(const kv_lora_term& t, const T* panel, const float* inner, Y* y, int64_t stride, int columns, int rows) {
    int m = 0;
    for (; m + OUTER_ROWS <= rows; m += OUTER_ROWS)
        outer_tile<T, Y, OUTER_ROWS>(t, panel, inner + m * t.rank, y + m * stride, stride, columns);
    for (; m + 2 <= rows; m += 2) outer_tile<T, Y, 2>(t, panel, inner + m * t.rank, y + m * stride, stride, columns);
    if (m < rows) outer_tile<T, Y, 1>(t, panel, inner + m * t.rank, y + m * stride, stride, columns);
}

template <class T, class Y>
void add_lora(Worker& w, const LoraTerms& all, const T* x, int64_t x_stride, Y* y, int64_t y_stride) {
    const auto groups = [](const kv_lora_term& t) { return ceil_div(t.rank, INNER_RANKS); };
    w.for_each(all.tasks(groups), [&](int task) {
        all.task(task, groups, [&](const kv_lora_term& t, float* inner, int row, int rows, int group) {
            const int first = group * INNER_RANKS, left = t.rank - first;
            const T* a = static_cast<const T*>(t.a) + int64_t(first) * t.in;
            const T* from = x + row * x_stride;
            if (left >= INNER_RANKS) return inner_rows<T, INNER_RANKS>(t, a, from, x_stride, inner + first, rows);
            for (int r = 0; r < left; ++r)
                inner_rows<T, 1>(t, a + int64_t(r) * t.in, from, x_stride, inner + first + r, rows);
        });
    });
    const auto chunks = [](const kv_lora_term& t) { return ceil_div(t.out, PANEL * PANELS_PER_TASK); };
    w.for_each(all.tasks(chunks), [&](int task) {
        all.task(task, chunks, [&](const kv_lora_term& t, const float* inner, int row, int rows, int chunk) {
            const int panels = ceil_div(t.out, PANEL), stop = (chunk + 1) * PANELS_PER_TASK;
            for (int p = chunk * PANELS_PER_TASK; p < panels && p < stop; ++p)
                outer_rows(t, static_cast<const T*>(t.b) + int64_t(p) * t.rank * PANEL, inner,
                           y + row * y_stride + t.first + p * PANEL, y_stride, t.out - p * PANEL, rows);
        });
    });
}

}  // namespace KV_VARIANT
