// The C interface of the native CPU kernels. Pointers are to memory that the caller owns; "rows" are tokens of a step.
// No function allocates for the caller, throws, or checks its arguments: common/kernels/native/ checks them.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

enum kv_dtype : int32_t { KV_F32 = 0, KV_BF16 = 1, KV_FP8 = 2 };  // KV_FP8: e4m3
enum kv_format : int32_t { KV_LINEAR_F32 = 0, KV_LINEAR_BF16 = 1, KV_LINEAR_INT8 = 2, KV_LINEAR_INT4 = 3, KV_LINEAR_FP4 = 4 };

// y = x W^T + bias. W is packed in panels of 32 outputs, outputs padded with zeros; inputs padded to whole units:
//   F32   [panels][in][32] float
//   BF16  [panels][in/2][32][2] bfloat16
//   INT8  [panels][in/4][32][4] int8; scale [panels * 32], one for each output
//   INT4  [panels][in/8][32] uint32 of 8 codes: code of input 2j in bits 4j, of input 2j+1 in bits 16+4j;
//         scale, zero [panels][in/group][32]: weight = scale * (code - zero); group is a multiple of 8
//   FP4   the same without zero: weight = scale * number, of a code in e2m1
// With is_paired, a panel holds 16 outputs of the first half and the same 16 of the second half of `out`.
struct kv_linear {
    int32_t format, out, in, group, is_paired;
    const void* weight;
    const float* scale;
    const float* zero;
    const float* bias;  // [out] or null
};

// The gate of a paired layer turns its outputs into silu(first half) * second half, or into a / (1 + e^(-alpha * a)) * (b + 1),
// with a = min(first half, limit) and b = the second half, clamped to [-limit, limit].
enum kv_gate_kind : int32_t { KV_NO_GATE = 0, KV_SILU_GATE = 1, KV_CLAMPED_GATE = 2 };
struct kv_gate {
    int32_t kind;
    float alpha, limit;
};

// The experts in slots [first, first + num_experts) of a mixture. Without `slots` each expert is in the slot of its number. Otherwise
// its replicas take its rows in turn: `slots` is [experts][slot_stride], with the slots of an expert's replicas[expert] replicas
// first, and counts[expert] counts its rows, computed on this or another rank.
struct kv_experts {
    const kv_linear* gate_up;  // in each slot, paired
    const kv_linear* down;
    const int32_t* slots;     // or null
    const int32_t* replicas;  // [experts]
    int64_t* counts;          // [experts]
    int32_t first, num_experts, hidden, inner, slot_stride;
    kv_gate gate;
};

// The experts of each row and their weights, [rows][top_k].
struct kv_choice {
    const int64_t* experts;
    const float* weights;
    int32_t rows, top_k;
};

// How a row's experts and their weights follow from its logits; `route` in common/model/mixture/routing.py does the same.
enum kv_scores { KV_SOFTMAX = 0, KV_SIGMOID = 1, KV_SOFTMAX_OF_CHOSEN = 2 };
struct kv_router {
    kv_linear logits;             // float32
    const float* selection_bias;  // [num_experts]: added to the scores that experts are chosen by; or null
    int32_t scores, num_experts, top_k, normalizes, num_groups, groups_kept, group_score_of;
    float scaling;
};

// The MLP of a layer that is a mixture. shared_gate_up, shared_down: the experts that all rows share; null weights if there are
// none.
struct kv_mixture {
    kv_router router;
    kv_experts experts;
    kv_linear shared_gate_up, shared_down;
};

// K and V of one layer of a rank's cache, each [num_blocks][kv_heads][block_size][head_dim].
struct kv_cache {
    void* k;
    void* v;
    int32_t dtype, kv_heads, head_dim, block_size;
    float k_scale, v_scale;  // a stored number times its scale is the value; 1 unless dtype is KV_FP8
    int32_t window;   // a row at position p attends to positions (p - window, p]; 0: all up to p
    float soft_cap;   // c in c * tanh(score / c); 0: none
    const float* sinks;  // [q_heads]: a score that joins the softmax of each row of a head, without a value; null: none
};

// The sequences of one step. Entry i has rows [first_rows[i], first_rows[i + 1]), the last positions of a context of
// context_lens[i] tokens, which lie in blocks block_ids[first_blocks[i]...]. slots: [rows], block * block_size + offset.
// Blocks wholly before the windows of all rows of an entry are not read.
//
// The batch may be that of a stripe: of every N-th block of each context, for ranks that share contexts. Then row i attends to
// tokens [row_starts[i], row_ends[i]) of its entry's blocks, perhaps to none; neither end is before that of the row before it
// in the entry. context_lens counts the entry's tokens in the stripe, a slot of -1 belongs to another stripe, and the cache has
// no sinks. The results are partial: see attention_forward.
struct kv_batch {
    int32_t num_entries, num_rows;
    const int32_t* first_rows;
    const int32_t* context_lens;
    const int32_t* first_blocks;
    const int32_t* block_ids;
    const int64_t* slots;
    const int32_t* row_starts;  // [rows]; null unless of a stripe, like row_ends
    const int32_t* row_ends;
    int32_t partial_dim;  // of a stripe: how many numbers of each head's results are wanted
};

// One layer of one rank. Norm weights are float32.
struct kv_layer {
    kv_linear qkv, output, gate_up, down;
    const kv_mixture* mixture; // in place of gate_up and down; or null
    const float* input_norm;   // [hidden]
    const float* mlp_norm;     // [hidden]
    const float* head_norm;    // [q_heads + kv_heads][head_dim] or null
    float input_eps, mlp_eps, head_eps, attention_scale;
    int32_t hidden, q_heads, kv_heads, head_dim, dtype;  // dtype: of hidden states, KV_F32 or KV_BF16
};

// Rotation angles of every position, each [positions][head_dim / 2], and the positions of a step's rows.
struct kv_rotation {
    const float* cos;
    const float* sin;
    const int64_t* positions;  // [rows]
};

// Rows [start, stop) of a step, which have the same LoRA adapter.
struct kv_lora_run {
    int32_t start, stop;
};

// An adapter's term for outputs [first, first + out) of a linear layer, in the rows of a run: scale * (x A^T) B^T.
struct kv_lora_term {
    const void* a;  // [rank][in]
    const void* b;  // [panels of 32 outputs][rank][32], outputs padded with zeros
    float scale;
    int32_t rank, in, out, first, run;
};

// The terms of a step's adapters for a layer's linear layers: qkv, output, gate_up, down. a and b are of the type of hidden
// states.
struct kv_lora {
    const kv_lora_run* runs;
    const kv_lora_term* terms[4];
    int32_t counts[4];
};

// All of a model: embedding, layers, final norm, LM head. Rows of the embedding have the layers' hidden size and dtype.
struct kv_model {
    const kv_layer* const* layers;
    const kv_cache* const* caches;   // of each layer
    const kv_batch* const* batches;  // of each layer
    const void* embedding;
    const float* final_norm;
    const kv_linear* lm_head;
    kv_rotation rotation;
    int32_t num_layers;
    float final_eps;
};

// A token to be drawn with weights e^((logits[i] - top) / temperature), top being the highest logit, and the noise of `key`.
struct kv_draw {
    const float* logits;
    float top, temperature;
    uint32_t key[2];
};

struct kv_team;

// The best variant that this processor runs, among those compiled in, at most `limit`. "": no limit, except that Intel's
// processors get amx or, without matrix units, avx512. Emulated ones must be named. Returns its name, null if `limit` is unknown.
const char* kv_best_variant(const char* limit);

// Row i of each plane's part of `packed` becomes row rows[i] of the plane. Rows have row_bytes; planes lie plane_stride
// bytes apart, their parts of `packed` packed_stride. Any thread may call it: there is no team.
void kv_scatter_rows(void* planes, int64_t plane_stride, int32_t num_planes, const int64_t* rows, int32_t num_rows,
                     int64_t row_bytes, const void* packed, int64_t packed_stride);

// Checks a batch for a cache of `num_blocks` blocks. Any thread may call it.
enum kv_batch_error { KV_BATCH_OK = 0, KV_BATCH_BLOCK = 1, KV_BATCH_ROWS = 2, KV_BATCH_SLOT = 3 };
int32_t kv_check_batch(const kv_batch*, int32_t num_blocks, int32_t block_size);

// A team of `threads` threads, as long as the process; the caller of a function below is one of them. Waiting members spin
// briefly, then sleep. One call at a time. Null if the threads cannot be started.
kv_team* kv_team_new(int32_t threads);

// The functions of a variant. Their symbols begin with its name: avx2_linear_forward.
#ifdef KV_VARIANT
#define KV_PASTE(variant, name) variant##_##name
#define KV_PASTE_VALUES(variant, name) KV_PASTE(variant, name)
#define KV_FUNCTION(name) KV_PASTE_VALUES(KV_VARIANT, name)

// x: [rows][in] of x_dtype, rows x_stride numbers apart; y: [rows][out] of y_dtype, rows y_stride apart.
void KV_FUNCTION(linear_forward)(kv_team*, const kv_linear*, const void* x, int32_t x_dtype, int64_t x_stride, void* y,
                                 int32_t y_dtype, int64_t y_stride, int32_t rows);

// y[row][head] = x[row][head] W[head]^T: the layer, of float weights without bias, has the matrices of all heads one after the
// other, each of a multiple of 32 outputs. x, y: of dtype; rows are x_stride or y_stride numbers apart, heads x_head or y_head.
void KV_FUNCTION(heads_forward)(kv_team*, const kv_linear*, int32_t heads, const void* x, int64_t x_stride, int64_t x_head,
                                void* y, int64_t y_stride, int64_t y_head, int32_t dtype, int32_t rows);

// out = the weighted sum of the outputs of each row's experts, without those on other ranks. x: [rows][hidden] of dtype; out:
// [rows][hidden] float32.
void KV_FUNCTION(experts_forward)(kv_team*, const kv_experts*, const kv_choice*, const void* x, int32_t dtype, float* out);

// out = this rank's part of the mixture's output. x, out: [rows][hidden] of dtype.
void KV_FUNCTION(mixture_forward)(kv_team*, const kv_mixture*, const void* x, int32_t dtype, int32_t rows, void* out);

// cos, sin: [rows][half] of positions[row] * inverse_frequencies[i].
void KV_FUNCTION(rotation_angles)(kv_team*, const int64_t* positions, int32_t rows, const float* inverse_frequencies,
                                  int32_t half, float* cos, float* sin);

// Append k, v and attend causally. q: [rows][q_heads][head_dim], k, v: [rows][kv_heads][head_dim] of `dtype`, rows at a
// distance of the strides; out: [rows][q_heads][head_dim], contiguous. Of a stripe, out is [rows][q_heads][partial_dim + 1]
// float32: a partial result, and the logarithm of the sum of its exponentiated scores; without tokens zeros and minus infinity.
void KV_FUNCTION(attention_forward)(kv_team*, const kv_cache*, const kv_batch*, int32_t q_heads, float scale, int32_t dtype,
                                    const void* q, int64_t q_stride, const void* k, int64_t k_stride, const void* v,
                                    int64_t v_stride, void* out);

// Joins the partial results of at most 64 stripes. parts: [stripes][rows][heads][dim + 1], as attention_forward writes them;
// sinks: [heads] or null, as in kv_cache; out: [rows][heads][dim] of dtype.
void KV_FUNCTION(join_partials)(kv_team*, const float* parts, int32_t stripes, int32_t rows, int32_t heads, int32_t dim,
                                const float* sinks, int32_t dtype, void* out);

// The first part of a layer: residual += delta (unless null), norm, q/k/v, rotation, append, attention. The attended
// rows stay in the team's memory for layer_project. residual, delta: [rows][hidden]. kv_lora: null without adapters.
void KV_FUNCTION(layer_attend)(kv_team*, const kv_layer*, const kv_cache*, const kv_batch*, const kv_rotation*, const kv_lora*,
                               void* residual, const void* delta);
// The first part up to the rotation, for attention elsewhere. qkv: [rows][q_heads + 2 * kv_heads][head_dim], of the layer's dtype.
void KV_FUNCTION(layer_rows)(kv_team*, const kv_layer*, int32_t rows, const kv_rotation*, const kv_lora*, void* residual,
                             const void* delta, void* qkv);
// delta = output projection of `attended`, [rows][q_heads][head_dim]; null: of the rows that layer_attend left.
void KV_FUNCTION(layer_project)(kv_team*, const kv_layer*, int32_t rows, const kv_lora*, const void* attended, void* delta);
// residual += delta; delta = MLP(norm(residual)).
void KV_FUNCTION(layer_mlp)(kv_team*, const kv_layer*, int32_t rows, const kv_lora*, void* residual, void* delta);

// layer_attend, layer_project and layer_mlp of each of `count` layers, without adapters. The first layer gets a null delta; `delta`
// is set to the last one's.
void KV_FUNCTION(layers_forward)(kv_team*, int32_t count, const kv_layer* const* layers, const kv_cache* const* caches,
                                 const kv_batch* const* batches, const kv_rotation*, void* residual, void* delta);

// Logits of all rows of a batch, [rows][lm_head.out] float32, without adapters. token_ids: [rows], all in the vocabulary.
void KV_FUNCTION(model_forward)(kv_team*, const kv_model*, const int64_t* token_ids, float* logits);

// y += terms. x: [rows][in] of `dtype`, the type of all a and b; y: [rows][outputs] of y_dtype. No two terms share an
// output of a row.
void KV_FUNCTION(lora_add)(kv_team*, const kv_lora_term* terms, int32_t count, const kv_lora_run* runs, int32_t dtype,
                           const void* x, int64_t x_stride, void* y, int32_t y_dtype, int64_t y_stride);

// out = silu(first half) * second half. x: [rows][2 * half], out: [rows][half], both of dtype.
void KV_FUNCTION(silu_and_mul)(kv_team*, const void* x, int32_t dtype, int32_t rows, int32_t half, void* out);

// residual += delta (unless null); out = norm(residual). All [rows][hidden] of dtype.
void KV_FUNCTION(norm)(kv_team*, const float* weight, float eps, int32_t hidden, int32_t dtype, int32_t rows, void* residual,
                       const void* delta, void* out);

// out[i] = x[i] if bit i of `mask` is set, else -infinity; i < size. The lowest bit of a byte comes first; bits past the end of
// the mask count as not set.
void KV_FUNCTION(mask)(kv_team*, const float* x, int32_t size, const uint8_t* mask, int32_t mask_bytes, float* out);
// out[i] = log of the sum of e^(x - highest[i]) over row indices[i] of x, [*][size] float32, whose maximum is highest[i].
// maxima: [count][size / KV_MAXIMA_OF], the highest of each KV_MAXIMA_OF numbers of the row.
enum { KV_MAXIMA_OF = 128 };
void KV_FUNCTION(log_sum_exp)(kv_team*, const float* x, int32_t size, const int32_t* indices, int32_t count,
                              const float* highest, double* out, float* maxima);
// out[i] = the token of draws[i], whose logits are [size].
void KV_FUNCTION(draw_tokens)(kv_team*, const kv_draw* draws, int32_t count, int32_t size, int32_t* out);
#endif
}
#pragma GCC visibility pop
