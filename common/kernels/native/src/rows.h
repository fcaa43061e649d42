// Operations on single rows: norms, rotation, conversion.
#pragma once
#include "api.h"
#include "attention.h"
#include "simd.h"
#include "team.h"

namespace KV_VARIANT {

// f(first, count) for each run of up to sixteen of n numbers.
template <class F>
KV_INLINE void for_lanes(int n, const F& f) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) f(i, LANES);
    if (i < n) f(i, n - i);
}
template <class T>
KV_INLINE Lanes read(const T* x, int count) {
    return count == LANES ? load(x) : load_some(x, count);
}
template <class T>
KV_INLINE void write(T* x, Lanes a, int count) {
    count == LANES ? store(x, a) : store_some(x, a, count);
}

template <class In, class Out>
KV_INLINE void norm_row(const In* x, const float* weight, float eps, int n, Out* out) {
    Lanes squares = zeros();
    for_lanes(n, [&](int i, int count) {
        const Lanes a = read(x + i, count);
        squares = multiply_add(a, a, squares);
    });
    const Lanes factor = splat(1.0f / std::sqrt(sum(squares) / float(n) + eps));
    for_lanes(n, [&](int i, int count) {
        write(out + i, read(x + i, count) * factor * read(weight + i, count), count);
    });
}

// residual += delta (unless null), rounded to Model; out = norm(residual).
template <class Model, class Out>
void add_norm(Worker& w, int rows, int n, const float* weight, float eps, Model* residual, const Model* delta, Out* out,
              int64_t out_stride) {
    w.for_each(rows, [&](int row) {
        Model* x = residual + int64_t(row) * n;
        if (delta)
            for_lanes(n, [&](int i, int count) {
                write(x + i, read(x + i, count) + read(delta + int64_t(row) * n + i, count), count);
            });
        norm_row(x, weight, eps, n, out + row * out_stride);
    });
}

// Pairs (i, i + dim / 2) turned by the row's angles. x: [dim].
KV_INLINE void rotate(float* x, const float* cos, const float* sin, int dim) {
    float* y = x + dim / 2;
    for_lanes(dim / 2, [&](int i, int count) {
        const Lanes a = read(x + i, count), b = read(y + i, count), c = read(cos + i, count), s = read(sin + i, count);
        write(x + i, a * c - b * s, count);
        write(y + i, b * c + a * s, count);
    });
}

// f(row, first, last) for all rows' heads, in parts of a row where rows are few.
template <class F>
void for_heads(Worker& w, int rows, int heads, const F& f) {
    const int parts = rows < w.team.size() * 4 ? w.team.size() : 1;
    w.for_each(rows * parts, [&](int task) {
        const int part = task % parts;
        f(task / parts, heads * part / parts, heads * (part + 1) / parts);
    });
}

// Head norm and rotation, in place, of head h of q and k.
inline void turn_head(const kv_layer& l, const kv_rotation& rotation, int row, int h, float* x) {
    if (h >= l.q_heads + l.kv_heads) return;
    if (l.head_norm) norm_row(x, l.head_norm + h * l.head_dim, l.head_eps, l.head_dim, x);
    const int64_t angles = rotation.positions[row] * (l.head_dim / 2);
    rotate(x, rotation.cos + angles, rotation.sin + angles, l.head_dim);
}

// Head norm and rotation of q and k; k and v go to the cache, q to `queries`. qkv: [rows][q + k + v heads][dim] float32,
// overwritten.
template <class Act>
void rotate_and_append(Worker& w, const kv_layer& l, const kv_cache& cache, const kv_batch& batch,
                       const kv_rotation& rotation, float* qkv, int64_t stride, Act* queries, int64_t query_stride) {
    const int dim = l.head_dim;
    for_heads(w, batch.num_rows, l.q_heads + 2 * l.kv_heads, [&](int row, int first, int last) {
        for (int h = first; h < last; ++h) {
            float* x = qkv + row * stride + h * dim;
            turn_head(l, rotation, row, h, x);
            if (h < l.q_heads)
                for_lanes(dim, [&](int i, int count) {
                    write(queries + row * query_stride + h * dim + i, read(x + i, count), count);
                });
            else if (h < l.q_heads + l.kv_heads)
                put_head(cache, 0, batch.slots[row], h - l.q_heads, x);
            else
                put_head(cache, 1, batch.slots[row], h - l.q_heads - l.kv_heads, x);
        }
    });
}

// Head norm and rotation of q and k, then all heads to `out`: [rows][q + k + v heads][dim]. qkv: as above.
template <class Model>
void rotate_rows(Worker& w, const kv_layer& l, int rows, const kv_rotation& rotation, float* qkv, int64_t stride, Model* out) {
    const int dim = l.head_dim, heads = l.q_heads + 2 * l.kv_heads;
    for_heads(w, rows, heads, [&](int row, int first, int last) {
        for (int h = first; h < last; ++h) {
            float* x = qkv + row * stride + h * dim;
            turn_head(l, rotation, row, h, x);
            for_lanes(dim, [&](int i, int count) {
                write(out + (int64_t(row) * heads + h) * dim + i, read(x + i, count), count);
            });
        }
    });
}

// out = silu(first half) * second half. x: [rows][2 * half].
template <class In, class Out>
void silu_and_mul_rows(Worker& w, int rows, int half, const In* x, int64_t x_stride, Out* out, int64_t out_stride) {
    constexpr int PART = 1024;
    const int parts = (half + PART - 1) / PART;
    w.for_each(rows * parts, [&](int task) {
        const int row = task / parts, first = task % parts * PART;
        const In* gate = x + row * x_stride + first;
        Out* to = out + row * out_stride + first;
        for_lanes(half - first < PART ? half - first : PART, [&](int i, int count) {
            write(to + i, silu(read(gate + i, count)) * read(gate + half + i, count), count);
        });
    });
}

// out: [dim] of one row's head, from its partial results and log-sums, parts[stripe * stride][dim + 1], and its sink's score.
template <class Out>
void join_stripes(const float* parts, int64_t stride, int stripes, int dim, float sink, Out* out) {
    float top = sink, weights[64];
    for (int s = 0; s < stripes; ++s) top = std::max(top, parts[s * stride + dim]);
    top = std::max(top, -3e38f);  // minus infinity less itself would be NaN, for a row that sees nothing anywhere
    float total = std::exp(sink - top);
    for (int s = 0; s < stripes; ++s) total += weights[s] = std::exp(parts[s * stride + dim] - top);
    const float factor = total > 1e-30f || std::isnan(total) ? 1 / total : 0;
    for_lanes(dim, [&](int i, int count) {
        Lanes sums = zeros();
        for (int s = 0; s < stripes; ++s) sums = multiply_add(read(parts + s * stride + i, count), splat(weights[s] * factor), sums);
        write(out + i, sums, count);
    });
}

template <class In, class Out>
void convert(Worker& w, int rows, int n, const In* x, int64_t x_stride, Out* out, int64_t out_stride) {
    w.for_each(rows, [&](int row) {
        for_lanes(n, [&](int i, int count) {
            write(out + row * out_stride + i, read(x + row * x_stride + i, count), count);
        });
    });
}

}  // namespace KV_VARIANT
