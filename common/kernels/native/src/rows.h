// Operations on single rows: norms, rotation, conversion.
#pragma once
#include "api.h"
#include "attention.h"
#include "simd.h"
#include "team.h"

namespace KV_VARIANT {

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

// Head norm and rotation of q and k, in place, then put(row, head, x) of each head of q, k and v. qkv: [rows][q + k + v heads]
// [dim] float32. If rows are few, the heads of a row are shared out, too.
template <class F>
void turn_heads(Worker& w, const kv_layer& l, int rows, const kv_rotation& rotation, float* qkv, int64_t stride, const F& put) {
    const int dim = l.head_dim, turned = l.q_heads + l.kv_heads, heads = turned + l.kv_heads;
    const int parts = rows < w.team.size() * 4 ? w.team.size() : 1;
    w.for_each(rows * parts, [&](int task) {
        const int row = task / parts, part = task % parts;
        const int64_t angles = rotation.positions[row] * (dim / 2);
        for (int h = heads * part / parts; h < heads * (part + 1) / parts; ++h) {
            float* x = qkv + row * stride + h * dim;
            if (h < turned && l.head_norm) norm_row(x, l.head_norm + h * dim, l.head_eps, dim, x);
            if (h < turned) rotate(x, rotation.cos + angles, rotation.sin + angles, dim);
            put(row, h, x);
        }
    });
}

// out = silu(first half) * second half. x: [rows][2 * half].
template <class In, class Out>
void silu_and_mul_rows(Worker& w, int rows, int half, const In* x, int64_t x_stride, Out* out, int64_t out_stride) {
    constexpr int PART = 1024;
    const int parts = ceil_div(half, PART);
    w.for_each(rows * parts, [&](int task) {
        const int row = task / parts, first = task % parts * PART;
        const In* gate = x + row * x_stride + first;
        Out* to = out + row * out_stride + first;
        for_lanes(std::min(half - first, PART), [&](int i, int count) {
            write(to + i, silu(read(gate + i, count)) * read(gate + half + i, count), count);
        });
    });
}

// Joins the partial results of one row's head to out: [dim]. Those of a stripe begin at parts[stripe * stride]: [dim + 1], the
// last number is the log-sum. sink: the score of the head's sink.
template <class Out>
void join_stripes(const float* parts, int64_t stride, int stripes, int dim, float sink, Out* out) {
    float top = sink, weights[64];
    for (int s = 0; s < stripes; ++s) top = std::max(top, parts[s * stride + dim]);
    top = std::max(top, -3e38f);  // of a row that sees nothing: minus infinity less itself would be NaN
    float total = std::exp(sink - top);
    for (int s = 0; s < stripes; ++s) total += weights[s] = std::exp(parts[s * stride + dim] - top);
    const float factor = total > 1e-30f || std::isnan(total) ? 1 / total : 0;
    for_lanes(dim, [&](int i, int count) {
        Lanes sums = zeros();
        for (int s = 0; s < stripes; ++s)
            sums = multiply_add(read(parts + s * stride + i, count), splat(weights[s] * factor), sums);
        write(out + i, sums, count);
    });
}

template <class In, class Out>
void convert(Worker& w, int rows, int n, const In* x, int64_t x_stride, Out* out, int64_t out_stride) {
    w.for_each(rows, [&](int row) { copy(x + row * x_stride, n, out + row * out_stride); });
}

}  // namespace KV_VARIANT
