// Attention over random batches, random linear layers and mixtures, in memory of exactly the sizes that the interface names, for
// address and undefined-behaviour sanitizers. Compiled for each variant, with -DKV_VARIANT. Arguments: the variant, how many of
// each.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "api.h"

namespace {

std::mt19937 generator(1);

int below(int n) { return int(generator() % unsigned(n)); }
int one_of(std::initializer_list<int> values) { return values.begin()[below(int(values.size()))]; }

size_t size_of(int dtype) { return dtype == KV_F32 ? 4 : dtype == KV_BF16 ? 2 : 1; }

// Memory without slack, so that reading past its end is seen.
struct Numbers {
    Numbers(size_t count, int dtype) : size(count * size_of(dtype)), memory(static_cast<char*>(std::malloc(size))) {
        for (size_t i = 0; i < count; ++i) {
            const float x = float(below(2001) - 1000) / 500;
            uint32_t bits;
            std::memcpy(&bits, &x, 4);
            if (dtype == KV_F32) std::memcpy(memory + 4 * i, &x, 4);
            if (dtype == KV_BF16) std::memcpy(memory + 2 * i, reinterpret_cast<char*>(&bits) + 2, 2);
            if (dtype == KV_FP8) memory[i] = char(below(0x7f));
        }
    }
    ~Numbers() { std::free(memory); }

    size_t size;
    char* memory;
};

void attend(kv_team* team) {
    const int kv_heads = 1 + below(3), q_heads = kv_heads * one_of({1, 2, 7, 13}), block_size = one_of({1, 5, 16, 32});
    const int dim = one_of({2, 6, 16, 30, 64, 80, 128, 512}), dtype = below(2), cache_dtype = below(3);
    const int window = one_of({0, 0, 1, 16, 100, 128, 200});
    const float soft_cap = float(below(2)) * 30;
    std::vector<int32_t> first_rows{0}, context_lens, first_blocks{0};
    const int num_entries = 1 + below(5);
    for (int i = 0; i < num_entries; ++i) {
        const int rows = one_of({1, 1, 2, 1 + below(70)});
        context_lens.push_back(rows + one_of({0, 0, 1, 15, 127, 128, below(700)}));
        first_rows.push_back(first_rows.back() + rows);
        first_blocks.push_back(first_blocks.back() + (context_lens.back() + block_size - 1) / block_size);
    }
    std::vector<int32_t> block_ids(size_t(first_blocks.back()));
    std::iota(block_ids.begin(), block_ids.end(), 0);
    std::shuffle(block_ids.begin(), block_ids.end(), generator);
    std::vector<int64_t> slots;
    for (int i = 0; i < num_entries; ++i)
        for (int row = first_rows[i]; row < first_rows[i + 1]; ++row) {
            const int position = context_lens[i] - (first_rows[i + 1] - row);
            slots.push_back(int64_t(block_ids[first_blocks[i] + position / block_size]) * block_size +
                            position % block_size);
        }
    const int num_blocks = first_blocks.back();
    const bool is_stripe = below(2);
    for (int i = 0; window && !is_stripe && i < num_entries; ++i) {
        const int seen = context_lens[i] - (first_rows[i + 1] - first_rows[i]) + 1;
        for (int block = 0; block < std::max(0, seen - window) / block_size; ++block)
            block_ids[first_blocks[i] + block] = 1 << 30;  // not to be read
    }
    // The same contexts as one of several stripes: some rows see nothing, some slots are another stripe's.
    std::vector<int32_t> row_starts, row_ends;
    for (int i = 0; is_stripe && i < num_entries; ++i) {
        context_lens[i] = below(4) ? below(context_lens[i] + 1) : 0;
        int start = 0, end = 0;
        for (int row = first_rows[i]; row < first_rows[i + 1]; ++row) {
            end = row + 1 == first_rows[i + 1] ? context_lens[i] : end + below(std::min(3, context_lens[i] - end) + 1);
            start = window ? std::max(start, end - below(window + 1)) : 0;
            row_starts.push_back(start), row_ends.push_back(end);
            if (below(2)) slots[row] = -1;
        }
        for (int block = 0; block < row_starts[first_rows[i]] / block_size; ++block)
            block_ids[first_blocks[i] + block] = 1 << 30;
    }
    const int partial_dim = is_stripe ? 1 + below(dim) : 0;
    const size_t rows = slots.size(), plane = size_t(num_blocks) * size_t(kv_heads * block_size * dim);
    Numbers k(plane, cache_dtype), v(plane, cache_dtype);
    Numbers out(rows * q_heads * (is_stripe ? partial_dim + 1 : dim), is_stripe ? int(KV_F32) : dtype);
    Numbers q(rows * q_heads * dim, dtype), new_k(rows * kv_heads * dim, dtype), new_v(rows * kv_heads * dim, dtype);
    const kv_cache cache{k.memory, v.memory, cache_dtype, kv_heads, dim, block_size, 1, 1, window, soft_cap};
    const kv_batch batch{num_entries,         int(rows),        first_rows.data(), context_lens.data(),
                         first_blocks.data(), block_ids.data(), slots.data(),
                         is_stripe ? row_starts.data() : nullptr, is_stripe ? row_ends.data() : nullptr, partial_dim};
    KV_FUNCTION(attention_forward)(team, &cache, &batch, q_heads, 1 / std::sqrt(float(dim)), dtype, q.memory, q_heads * dim,
                                   new_k.memory, kv_heads * dim, new_v.memory, kv_heads * dim, out.memory);
    if (!is_stripe) return;
    const int stripes = 1 + below(4);
    Numbers parts(stripes * rows * q_heads * (partial_dim + 1), KV_F32), joined(rows * q_heads * partial_dim, dtype);
    KV_FUNCTION(join_partials)(team, reinterpret_cast<float*>(parts.memory), stripes, int(rows), q_heads, partial_dim, nullptr,
                               dtype, joined.memory);
}

bool has_groups(int format) { return format == KV_LINEAR_INT4 || format == KV_LINEAR_FP4; }

// A layer in memory of its own.
struct Layer {
    Layer(int format, int out, int in, bool is_paired, int group)
        : panels(is_paired ? (out / 2 + 15) / 16 : (out + 31) / 32),
          units((in + unit(format) - 1) / unit(format)),
          weight(panels * units * 32 * 4 / size_of(dtype(format)), dtype(format)),
          scale(panels * 32 * (has_groups(format) ? in / group : 1), KV_F32),
          zero(scale.size / 4, KV_F32),
          bias(out, KV_F32),
          linear{format, out, in, has_groups(format) ? group : 0, is_paired, weight.memory,
                 format >= KV_LINEAR_INT8 ? floats(scale) : nullptr,
                 format == KV_LINEAR_INT8 || format == KV_LINEAR_INT4 ? floats(zero) : nullptr,
                 below(2) ? floats(bias) : nullptr} {}

    static int unit(int format) { return has_groups(format) ? 8 : 1 << format; }  // inputs
    // Every unit takes 4 bytes of an output. KV_FP8: bytes from 0 to 126.
    static int dtype(int format) { return format >= KV_LINEAR_INT8 ? KV_FP8 : format == KV_LINEAR_BF16 ? KV_BF16 : KV_F32; }
    static const float* floats(const Numbers& numbers) { return reinterpret_cast<const float*>(numbers.memory); }

    size_t panels, units;
    Numbers weight, scale, zero, bias;
    kv_linear linear;
};

void multiply(kv_team* team) {
    const int format = below(5), is_paired = below(2);
    const int group = 8 * one_of({1, 2, 4, 8});
    const int in = has_groups(format) ? group * (1 + below(12)) : one_of({1, 2, 3, 40, 257, 896, 1 + below(600)});
    const int out = (1 + is_paired) * one_of({1, 16, 17, 1 + below(200), 1640});
    const int rows = one_of({1, 1, 2, 3, 4, 6, 13, 48, 1 + below(210)});
    const Layer layer(format, out, in, is_paired, group);
    const int x_dtype = below(2), y_dtype = below(2);
    Numbers x(size_t(rows) * in, x_dtype), y(size_t(rows) * out, y_dtype);
    KV_FUNCTION(linear_forward)(team, &layer.linear, x.memory, x_dtype, in, y.memory, y_dtype, out, rows);
}

void mix(kv_team* team) {
    // float32 experts are those of float32 models.
    const int dtype = below(2), format = dtype == KV_F32 ? one_of({0, 2, 3, 4}) : 1 + below(4), group = 8 * (1 + below(3));
    const int hidden = group * (1 + below(12)), inner = group * (1 + below(9));
    const int num_experts = 1 + below(16), first = below(3), all = first + num_experts + below(3), top_k = 1 + below(all);
    const int stride = 1 + below(3);
    const int rows = one_of({1, 2, 5, 1 + below(90)});
    std::vector<Layer> layers;
    layers.reserve(2 * num_experts);
    std::vector<kv_linear> gate_up, down;
    for (int i = 0; i < num_experts; ++i) {
        gate_up.push_back(layers.emplace_back(format, 2 * inner, hidden, true, group).linear);
        down.push_back(layers.emplace_back(format, hidden, inner, false, group).linear);
    }
    std::vector<int64_t> experts(size_t(rows) * top_k);
    for (int64_t& expert : experts) expert = below(all);
    std::vector<int32_t> slots(size_t(all) * stride), replicas(all);
    std::vector<int64_t> counts(all);
    for (int32_t& slot : slots) slot = below(all);  // of this rank or of another one
    for (int32_t& number : replicas) number = 1 + below(stride);
    const bool places = below(2);
    const Numbers weights(experts.size(), KV_F32), x(size_t(rows) * hidden, dtype), out(size_t(rows) * hidden, KV_F32);
    const kv_gate gate{below(2) ? KV_SILU_GATE : KV_CLAMPED_GATE, 1.7f, 7};
    const kv_experts own{gate_up.data(), down.data(), places ? slots.data() : nullptr, replicas.data(), counts.data(),
                         first,          num_experts, hidden,                          inner,           stride,
                         gate};
    const kv_choice choice{experts.data(), Layer::floats(weights), rows, top_k};
    KV_FUNCTION(experts_forward)(team, &own, &choice, x.memory, dtype, reinterpret_cast<float*>(out.memory));

    const int num_groups = all % 3 ? 1 : 3, shared = group * (1 + below(9));
    const Layer logits(KV_LINEAR_F32, all, hidden, false, 1);
    const Layer shared_gate_up(format, 2 * shared, hidden, true, group), shared_down(format, hidden, shared, false, group);
    const Numbers selection_bias(all, KV_F32), y(size_t(rows) * hidden, dtype);
    const int chosen = std::min(top_k, all / num_groups);
    const kv_router router{logits.linear, below(2) ? Layer::floats(selection_bias) : nullptr, int32_t(below(3)), all, chosen,
                           int32_t(below(2)), num_groups, 1, 1 + below(3), 1.5f};
    const bool shares = below(2);
    const kv_mixture mixture{router, own, shares ? shared_gate_up.linear : kv_linear{}, shares ? shared_down.linear : kv_linear{}};
    KV_FUNCTION(mixture_forward)(team, &mixture, x.memory, dtype, rows, y.memory);
}

}  // namespace

int main(int, char** arguments) {
    const char* chosen = kv_best_variant(arguments[1]);
    if (!chosen || std::strcmp(chosen, arguments[1])) return 77;  // this processor does not run it
    static kv_team* teams[4];  // A team is never freed. The leak check must find it when the loop is over.
    for (int threads : {1, 3}) {
        kv_team* team = teams[threads] = kv_team_new(threads);
        for (int i = 0; i < std::atoi(arguments[2]); ++i) attend(team), multiply(team), mix(team);
    }
    std::puts("done");
}
