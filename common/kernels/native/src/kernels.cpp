// All kernels of one variant. Compiled once for each, with -DKV_VARIANT=<name> and the variant's instruction sets.
#include "attention.h"
#include "draw.h"
#include "mixture.h"
#include "lora.h"

namespace KV_VARIANT {
namespace {

// The distance between scratch rows: not a power of two, because such rows would share cache sets.
int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES + 2 * LANES; }

// f(Model{}, Act{}) with the model's type and the type of activations inside: bfloat16 only if the processor multiplies it.
template <class F>
void with_act(int32_t dtype, const F& f) {
#ifdef KV_HAS_BF16_DOT
    if (dtype == KV_BF16) return f(bf16{}, bf16{});
#else
    if (dtype == KV_BF16) return f(bf16{}, float{});
#endif
    f(float{}, float{});
}

template <class T>
T* scratch(kv_team& team, kv_team::Use use, int64_t count) {
    team.buffers[use].reserve(size_t(count) * sizeof(T));
    return team.buffers[use].as<T>();
}

enum LayerLinear { QKV_LINEAR, OUTPUT_LINEAR, GATE_UP_LINEAR, DOWN_LINEAR };

// The terms of a step's adapters for one of a layer's linear layers; none without `lora`. Called outside of run().
LoraTerms lora_terms(kv_team& team, const kv_lora* lora, LayerLinear linear) {
    if (!lora) return {};
    int64_t most = 0;
    for (int i = 0; i < 4; ++i) most = std::max(most, LoraTerms{lora->terms[i], lora->counts[i], lora->runs}.inner_numbers());
    return {lora->terms[linear], lora->counts[linear], lora->runs, scratch<float>(team, kv_team::PARTIAL, most)};
}

// As many rows at a time as scratch memory has picks for. x, out: [rows][hidden].
template <class Model, class Act>
void add_up_experts(kv_team& team, const kv_experts& e, const kv_choice& choice, const Model* x, float* out) {
    const int most = std::max(MOST_PICKS / choice.top_k, 1);
    const int64_t hidden_stride = padded(e.hidden), inner_stride = padded(e.inner);
    for (int row = 0; row < choice.rows; row += most) {
        const int64_t first = int64_t(row) * choice.top_k, at = int64_t(row) * e.hidden;
        const kv_choice own{choice.experts + first, choice.weights + first, std::min(most, choice.rows - row), choice.top_k};
        const Picks picks = sort_by_expert(team, e, own);
        const ExpertShares shares = reserve_experts(team, e, picks);
        const PickRows<Act> rows{scratch<Act>(team, kv_team::NORMED, picks.count * hidden_stride),
                                 scratch<Act>(team, kv_team::INNER, picks.count * inner_stride),
                                 scratch<float>(team, kv_team::QKV, picks.count * hidden_stride), hidden_stride, inner_stride};
        team.run([&](Worker& w) { multiply_experts(w, e, own, picks, shares, x + at, rows, out + at); });
    }
}

// x, out: [rows][hidden]. `prepare(w)` writes x.
template <class Model, class Act, class F>
void mix(kv_team* team, const kv_mixture& m, int rows, const F& prepare, const Model* x, Model* out) {
    const kv_router& r = m.router;
    const int hidden = m.experts.hidden, shared = m.shared_down.weight ? m.shared_down.in : 0;
    const int64_t stride = padded(hidden), shared_stride = padded(shared), scores_stride = ROUTER_PARTS * int64_t(r.num_experts);
    reserve_linear(*team, r.logits, rows);
    float* wide = scratch<float>(*team, kv_team::QUERIES, rows * stride);
    float* scores = scratch<float>(*team, kv_team::ROUTER_SCORES, rows * scores_stride);
    int64_t* experts = scratch<int64_t>(*team, kv_team::ROUTER_CHOICE, 2 * int64_t(rows) * r.top_k);
    float* weights = reinterpret_cast<float*>(experts + int64_t(rows) * r.top_k);
    team->run([&](Worker& w) {
        prepare(w);
        convert(w, rows, hidden, x, hidden, wide, stride);
        linear<float>(w, r.logits, wide, stride, {scores, KV_F32, scores_stride}, rows);
        w.for_each(rows, [&](int row) {
            route_row(r, scores + row * scores_stride, experts + row * r.top_k, weights + row * r.top_k);
        });
    });
    const kv_choice choice{experts, weights, rows, r.top_k};
    float* sums = scratch<float>(*team, kv_team::MIXTURE_OUT, int64_t(rows) * hidden);
    add_up_experts<Model, Act>(*team, m.experts, choice, x, sums);
    if (shared) {
        reserve_linear(*team, m.shared_gate_up, rows);
        reserve_linear(*team, m.shared_down, rows);
    }
    Act* normed = scratch<Act>(*team, kv_team::NORMED, shared ? rows * stride : 0);
    Act* inner = scratch<Act>(*team, kv_team::INNER, rows * shared_stride);
    float* added = scratch<float>(*team, kv_team::QKV, shared ? int64_t(rows) * hidden : 0);
    team->run([&](Worker& w) {
        if (shared) {
            convert(w, rows, hidden, x, hidden, normed, stride);
            linear<Model>(w, m.shared_gate_up, normed, stride, {inner, dtype_of<Act>(), shared_stride, {KV_SILU_GATE, 0, 0}}, rows);
            linear<Model>(w, m.shared_down, inner, shared_stride, {added, KV_F32, hidden}, rows);
        }
        w.for_each(rows, [&](int row) {
            const int64_t at = int64_t(row) * hidden;
            for_lanes(hidden, [&](int k, int count) {
                const Lanes sum = read(sums + at + k, count);
                write(out + at + k, shared ? sum + read(added + at + k, count) : sum, count);
            });
        });
    });
}

// The first part of a layer: residual += delta, norm, q, k and v. normed: [rows][padded hidden]; qkv: [rows][qkv_stride].
template <class Model, class Act>
void put_qkv(Worker& w, const kv_layer& l, int rows, const LoraTerms& added, void* residual, const void* delta, Act* normed,
             float* qkv, int64_t qkv_stride) {
    const int64_t stride = padded(l.hidden);
    add_norm(w, rows, l.hidden, l.input_norm, l.input_eps, static_cast<Model*>(residual), static_cast<const Model*>(delta),
             normed, stride);
    linear<Model>(w, l.qkv, normed, stride, {qkv, KV_F32, qkv_stride}, rows);
    if (added.count) add_lora<Model>(w, added, normed, stride, qkv, qkv_stride);
}

// residual += delta; delta = mixture(norm(residual)): `layer_mlp` of a layer whose MLP is a mixture.
void layer_mixture(kv_team* team, const kv_layer* l, int32_t rows, void* residual, void* delta) {
    with_act(l->dtype, [&]<class Model, class Act>(Model, Act) {
        Model* x = scratch<Model>(*team, kv_team::MIXTURE_IN, int64_t(rows) * l->hidden);
        const auto norm = [&](Worker& w) {
            add_norm(w, rows, l->hidden, l->mlp_norm, l->mlp_eps, static_cast<Model*>(residual),
                     static_cast<const Model*>(delta), x, l->hidden);
        };
        mix<Model, Act>(team, *l->mixture, rows, norm, x, static_cast<Model*>(delta));
    });
}

}  // namespace
}  // namespace KV_VARIANT

using namespace KV_VARIANT;

void KV_FUNCTION(linear_forward)(kv_team* team, const kv_linear* l, const void* x, int32_t x_dtype, int64_t x_stride, void* y,
                                 int32_t y_dtype, int64_t y_stride, int32_t rows) {
    const Output output{y, y_dtype, y_stride};
    reserve_linear(*team, *l, rows);
    // float32 weights take float32 rows, whatever the model's dtype.
    const int32_t inside = l->format == KV_LINEAR_F32 ? KV_F32 : x_dtype;
    with_act(inside, [&]<class Model, class Act>(Model, Act) {
        if (x_dtype == dtype_of<Act>())
            return team->run([&](Worker& w) { linear<Model>(w, *l, static_cast<const Act*>(x), x_stride, output, rows); });
        const int64_t stride = padded(l->in);
        Act* converted = scratch<Act>(*team, kv_team::NORMED, rows * stride);
        team->run([&](Worker& w) {
            convert(w, rows, l->in, static_cast<const bf16*>(x), x_stride, converted, stride);
            linear<Model>(w, *l, converted, stride, output, rows);
        });
    });
}

// Rows become float32, which all variants multiply: reading the weights bounds the speed of few rows.
void KV_FUNCTION(heads_forward)(kv_team* team, const kv_linear* l, int32_t heads, const void* x, int64_t x_stride,
                                int64_t x_head, void* y, int64_t y_stride, int64_t y_head, int32_t dtype, int32_t rows) {
    const int in = l->in, panels = l->out / PANEL / heads;
    const int64_t stride = padded(int64_t(heads) * in);
    float* wide = scratch<float>(*team, kv_team::QUERIES, rows * stride);
    const auto multiply = [&]<class Weights>(Weights, Worker& w) {
        const int64_t bytes = Weights::panel_bytes(*l), number_bytes = dtype == KV_F32 ? 4 : 2;
        w.for_each(heads * panels, [&](int p) {
            const int head = p / panels;
            // Outputs of a panel are numbered through all heads.
            const int64_t gap = head * (y_head - int64_t(panels) * PANEL);
            const Output output{static_cast<char*>(y) + gap * number_bytes, dtype, y_stride};
            multiply_panel<Weights>(*l, p, static_cast<const char*>(l->weight) + p * bytes, bytes,
                                    {wide + int64_t(head) * in, stride}, output, 0, rows);
        });
    };
    with_act(dtype, [&]<class Model>(Model, auto) {
        team->run([&](Worker& w) {
            w.for_each(rows * heads, [&](int i) {
                const int64_t row = i / heads, head = i % heads;
                const Model* from = static_cast<const Model*>(x) + row * x_stride + head * x_head;
                copy(from, in, wide + row * stride + head * in);
            });
            l->format == KV_LINEAR_F32 ? multiply(Float32Weights{}, w) : multiply(ShiftedWeights{}, w);
        });
    });
}

void KV_FUNCTION(experts_forward)(kv_team* team, const kv_experts* e, const kv_choice* choice, const void* x, int32_t dtype,
                                  float* out) {
    with_act(dtype, [&]<class Model, class Act>(Model, Act) {
        add_up_experts<Model, Act>(*team, *e, *choice, static_cast<const Model*>(x), out);
    });
}

void KV_FUNCTION(mixture_forward)(kv_team* team, const kv_mixture* m, const void* x, int32_t dtype, int32_t rows, void* out) {
    with_act(dtype, [&]<class Model, class Act>(Model, Act) {
        const auto nothing = [](Worker&) {};
        mix<Model, Act>(team, *m, rows, nothing, static_cast<const Model*>(x), static_cast<Model*>(out));
    });
}

void KV_FUNCTION(rotation_angles)(kv_team* team, const int64_t* positions, int32_t rows, const float* inverse_frequencies,
                                  int32_t half, float* cos, float* sin) {
    team->run([&](Worker& w) {
        w.for_each(rows, [&](int row) {
            for (int i = 0; i < half; ++i) {
                const float angle = float(positions[row]) * inverse_frequencies[i];
                cos[int64_t(row) * half + i] = std::cos(angle);
                sin[int64_t(row) * half + i] = std::sin(angle);
            }
        });
    });
}

void KV_FUNCTION(attention_forward)(kv_team* team, const kv_cache* cache, const kv_batch* batch, int32_t q_heads, float scale,
                                    int32_t dtype, const void* q, int64_t q_stride, const void* k, int64_t k_stride,
                                    const void* v, int64_t v_stride, void* out) {
    const int rows = batch->num_rows, dim = cache->head_dim, width = q_heads * dim;
    const attention::Plan plan(*team, *cache, *batch, q_heads);
    with_act(dtype, [&]<class Model, class Act>(Model, Act) {
        const int64_t stride = padded(width);
        Act* queries = scratch<Act>(*team, kv_team::QUERIES, rows * stride);
        Act* attended = scratch<Act>(*team, kv_team::ATTENDED, batch->row_ends ? 0 : rows * stride);
        float* partials = batch->row_ends ? static_cast<float*>(out) : nullptr;
        team->run([&](Worker& w) {
            w.for_each(rows * cache->kv_heads, [&](int task) {
                const int row = task / cache->kv_heads, head = task % cache->kv_heads;
                if (batch->slots[row] < 0) return;  // another stripe's
                put_head(*cache, 0, batch->slots[row], head, static_cast<const Model*>(k) + row * k_stride + head * dim);
                put_head(*cache, 1, batch->slots[row], head, static_cast<const Model*>(v) + row * v_stride + head * dim);
            });
            convert(w, rows, width, static_cast<const Model*>(q), q_stride, queries, stride);
            attend<Act>(w, plan, *cache, *batch, scale, {queries, stride, attended, stride, partials});
            if (!partials) convert(w, rows, width, attended, stride, static_cast<Model*>(out), width);
        });
    });
}

void KV_FUNCTION(join_partials)(kv_team* team, const float* parts, int32_t stripes, int32_t rows, int32_t heads, int32_t dim,
                                const float* sinks, int32_t dtype, void* out) {
    with_act(dtype, [&]<class Model>(Model, auto) {
        team->run([&](Worker& w) {
            w.for_each(rows, [&](int row) {
                for (int head = 0; head < heads; ++head) {
                    const int64_t at = int64_t(row) * heads + head;
                    join_stripes(parts + at * (dim + 1), int64_t(rows) * heads * (dim + 1), stripes, dim,
                                 sinks ? sinks[head] : -__builtin_inff(), static_cast<Model*>(out) + at * dim);
                }
            });
        });
    });
}

void KV_FUNCTION(layer_attend)(kv_team* team, const kv_layer* l, const kv_cache* cache, const kv_batch* batch,
                               const kv_rotation* rotation, const kv_lora* lora, void* residual, const void* delta) {
    const int rows = batch->num_rows, dim = l->head_dim;
    const int64_t qkv_stride = padded((l->q_heads + 2 * l->kv_heads) * dim), stride = padded(l->q_heads * dim);
    reserve_linear(*team, l->qkv, rows);
    const attention::Plan plan(*team, *cache, *batch, l->q_heads);
    const LoraTerms added = lora_terms(*team, lora, QKV_LINEAR);
    with_act(l->dtype, [&]<class Model, class Act>(Model, Act) {
        Act* normed = scratch<Act>(*team, kv_team::NORMED, rows * padded(l->hidden));
        float* qkv = scratch<float>(*team, kv_team::QKV, rows * qkv_stride);
        Act* queries = scratch<Act>(*team, kv_team::QUERIES, rows * stride);
        Act* attended = scratch<Act>(*team, kv_team::ATTENDED, rows * stride);
        team->run([&](Worker& w) {
            put_qkv<Model>(w, *l, rows, added, residual, delta, normed, qkv, qkv_stride);
            turn_heads(w, *l, rows, *rotation, qkv, qkv_stride, [&](int row, int h, const float* x) {
                const int of_cache = h - l->q_heads;
                if (of_cache < 0) return copy(x, dim, queries + row * stride + h * dim);
                put_head(*cache, of_cache / l->kv_heads, batch->slots[row], of_cache % l->kv_heads, x);
            });
            attend<Act>(w, plan, *cache, *batch, l->attention_scale, {queries, stride, attended, stride});
        });
    });
}

void KV_FUNCTION(layer_rows)(kv_team* team, const kv_layer* l, int32_t rows, const kv_rotation* rotation, const kv_lora* lora,
                             void* residual, const void* delta, void* out) {
    const int heads = l->q_heads + 2 * l->kv_heads;
    const int64_t qkv_stride = padded(heads * l->head_dim);
    reserve_linear(*team, l->qkv, rows);
    const LoraTerms added = lora_terms(*team, lora, QKV_LINEAR);
    with_act(l->dtype, [&]<class Model, class Act>(Model, Act) {
        Act* normed = scratch<Act>(*team, kv_team::NORMED, rows * padded(l->hidden));
        float* qkv = scratch<float>(*team, kv_team::QKV, rows * qkv_stride);
        team->run([&](Worker& w) {
            put_qkv<Model>(w, *l, rows, added, residual, delta, normed, qkv, qkv_stride);
            turn_heads(w, *l, rows, *rotation, qkv, qkv_stride, [&](int row, int h, const float* x) {
                copy(x, l->head_dim, static_cast<Model*>(out) + (int64_t(row) * heads + h) * l->head_dim);
            });
        });
    });
}

void KV_FUNCTION(layer_project)(kv_team* team, const kv_layer* l, int32_t rows, const kv_lora* lora, const void* given,
                                void* delta) {
    reserve_linear(*team, l->output, rows);
    const LoraTerms added = lora_terms(*team, lora, OUTPUT_LINEAR);
    const int width = l->q_heads * l->head_dim;
    const int64_t stride = padded(width);
    with_act(l->dtype, [&]<class Model, class Act>(Model, Act) {
        if (given) scratch<Act>(*team, kv_team::ATTENDED, rows * stride);
        Act* attended = team->buffers[kv_team::ATTENDED].as<Act>();
        team->run([&](Worker& w) {
            if (given) convert(w, rows, width, static_cast<const Model*>(given), width, attended, stride);
            linear<Model>(w, l->output, attended, stride, {delta, l->dtype, l->hidden}, rows);
            if (added.count) add_lora<Model>(w, added, attended, stride, static_cast<Model*>(delta), l->hidden);
        });
    });
}

void KV_FUNCTION(layer_mlp)(kv_team* team, const kv_layer* l, int32_t rows, const kv_lora* lora, void* residual, void* delta) {
    if (l->mixture) return layer_mixture(team, l, rows, residual, delta);
    const int half = l->down.in;
    const int64_t hidden_stride = padded(l->hidden), inner_stride = padded(half), wide_stride = padded(2 * half);
    reserve_linear(*team, l->gate_up, rows);
    reserve_linear(*team, l->down, rows);
    const LoraTerms first = lora_terms(*team, lora, GATE_UP_LINEAR), last = lora_terms(*team, lora, DOWN_LINEAR);
    with_act(l->dtype, [&]<class Model, class Act>(Model, Act) {
        Act* normed = scratch<Act>(*team, kv_team::NORMED, rows * hidden_stride);
        Act* inner = scratch<Act>(*team, kv_team::INNER, rows * inner_stride);
        float* wide = scratch<float>(*team, kv_team::QKV, first.count ? rows * wide_stride : 0);
        const Output gated{inner, dtype_of<Act>(), inner_stride, {KV_SILU_GATE, 0, 0}};
        team->run([&](Worker& w) {
            add_norm(w, rows, l->hidden, l->mlp_norm, l->mlp_eps, static_cast<Model*>(residual),
                     static_cast<const Model*>(delta), normed, hidden_stride);
            if (first.count) {
                linear<Model>(w, l->gate_up, normed, hidden_stride, {wide, KV_F32, wide_stride}, rows);
                add_lora<Model>(w, first, normed, hidden_stride, wide, wide_stride);
                silu_and_mul_rows(w, rows, half, wide, wide_stride, inner, inner_stride);
            } else {
                linear<Model>(w, l->gate_up, normed, hidden_stride, gated, rows);
            }
            linear<Model>(w, l->down, inner, inner_stride, {delta, l->dtype, l->hidden}, rows);
            if (last.count) add_lora<Model>(w, last, inner, inner_stride, static_cast<Model*>(delta), l->hidden);
        });
    });
}

void KV_FUNCTION(layers_forward)(kv_team* team, int32_t count, const kv_layer* const* layers, const kv_cache* const* caches,
                                 const kv_batch* const* batches, const kv_rotation* rotation, void* residual, void* delta) {
    for (int i = 0; i < count; ++i) {
        const int32_t rows = batches[i]->num_rows;
        KV_FUNCTION(layer_attend)(team, layers[i], caches[i], batches[i], rotation, nullptr, residual, i ? delta : nullptr);
        KV_FUNCTION(layer_project)(team, layers[i], rows, nullptr, nullptr, delta);
        KV_FUNCTION(layer_mlp)(team, layers[i], rows, nullptr, residual, delta);
    }
}

void KV_FUNCTION(model_forward)(kv_team* team, const kv_model* m, const int64_t* token_ids, float* logits) {
    const int32_t hidden = m->layers[0]->hidden, dtype = m->layers[0]->dtype, rows = m->batches[0]->num_rows;
    const int64_t row_bytes = int64_t(hidden) * (dtype == KV_F32 ? 4 : 2);
    char* residual = scratch<char>(*team, kv_team::RESIDUAL, rows * row_bytes);
    char* delta = scratch<char>(*team, kv_team::DELTA, rows * row_bytes);
    char* normed = scratch<char>(*team, kv_team::FINAL, rows * row_bytes);
    const char* embedding = static_cast<const char*>(m->embedding);
    for (int32_t i = 0; i < rows; ++i) std::memcpy(residual + i * row_bytes, embedding + token_ids[i] * row_bytes, row_bytes);
    KV_FUNCTION(layers_forward)(team, m->num_layers, m->layers, m->caches, m->batches, &m->rotation, residual, delta);
    KV_FUNCTION(norm)(team, m->final_norm, m->final_eps, hidden, dtype, rows, residual, delta, normed);
    KV_FUNCTION(linear_forward)(team, m->lm_head, normed, dtype, hidden, logits, KV_F32, m->lm_head->out, rows);
}

void KV_FUNCTION(lora_add)(kv_team* team, const kv_lora_term* terms, int32_t count, const kv_lora_run* runs, int32_t dtype,
                           const void* x, int64_t x_stride, void* y, int32_t y_dtype, int64_t y_stride) {
    LoraTerms all{terms, count, runs};
    all.inner = scratch<float>(*team, kv_team::PARTIAL, all.inner_numbers());
    with_act(dtype, [&]<class Model>(Model, auto) {
        with_act(y_dtype, [&]<class Y>(Y, auto) {
            team->run([&](Worker& w) {
                add_lora<Model>(w, all, static_cast<const Model*>(x), x_stride, static_cast<Y*>(y), y_stride);
            });
        });
    });
}

void KV_FUNCTION(silu_and_mul)(kv_team* team, const void* x, int32_t dtype, int32_t rows, int32_t half, void* out) {
    with_act(dtype, [&]<class Model>(Model, auto) {
        team->run([&](Worker& w) {
            silu_and_mul_rows(w, rows, half, static_cast<const Model*>(x), 2 * half, static_cast<Model*>(out), half);
        });
    });
}

void KV_FUNCTION(norm)(kv_team* team, const float* weight, float eps, int32_t hidden, int32_t dtype, int32_t rows,
                       void* residual, const void* delta, void* out) {
    with_act(dtype, [&]<class Model>(Model, auto) {
        team->run([&](Worker& w) {
            add_norm(w, rows, hidden, weight, eps, static_cast<Model*>(residual), static_cast<const Model*>(delta),
                     static_cast<Model*>(out), hidden);
        });
    });
}

void KV_FUNCTION(mask)(kv_team*, const float* x, int32_t size, const uint8_t* mask, int32_t mask_bytes, float* out) {
    masked_copy(x, size, mask, mask_bytes, out);  // on this thread alone: waking the others takes as long as the copy
}

void KV_FUNCTION(log_sum_exp)(kv_team* team, const float* x, int32_t size, const int32_t* indices, int32_t count,
                              const float* highest, double* out, float* maxima) {
    const int64_t stride = size, maxima_stride = size / KV_MAXIMA_OF;
    team->run([&](Worker& w) {
        w.for_each(count, [&](int i) {
            out[i] = log_sum_exp_of(x + indices[i] * stride, size, highest[i], maxima + i * maxima_stride);
        });
    });
}

void KV_FUNCTION(draw_tokens)(kv_team* team, const kv_draw* draws, int32_t count, int32_t size, int32_t* out) {
    const int64_t blocks = ceil_div(size, DRAW_BLOCK);
    float* maxima = scratch<float>(*team, kv_team::PARTIAL, team->size() * blocks);
    team->run([&](Worker& w) {
        w.for_each(count, [&](int i) { out[i] = Draw(draws[i], size).token(maxima + w.index * blocks); });
    });
}

