// Paged attention straight from the KV blocks. The context is cut into partitions of a fixed size. Softmax is taken over each,
// and their results are merged in the order of positions. So a row's result depends on its query and its context only: neither
// the batch, nor the chunks of a prompt, nor the number of threads change it.
#pragma once
#include <cmath>

#include "attention_plan.h"

namespace KV_VARIANT {

// f(T{}) with the type of the cache's numbers.
template <class F>
KV_INLINE void with_cache_type(const kv_cache& cache, const F& f) {
    if (cache.dtype == KV_F32) return f(float{});
    if (cache.dtype == KV_BF16) return f(bf16{});
    f(fp8{});
}

// Store one head's numbers of one token. plane: 0 for K, 1 for V; x: [head_dim].
template <class In>
void put_head(const kv_cache& cache, int plane, int64_t slot, int head, const In* x) {
    const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
    const int64_t at = ((block * cache.kv_heads + head) * cache.block_size + offset) * cache.head_dim;
    with_cache_type(cache, [&]<class T>(T) {
        T* out = static_cast<T*>(plane ? cache.v : cache.k) + at;
        const Lanes scale = splat(plane ? cache.v_scale : cache.k_scale);
        for_lanes(cache.head_dim, [&](int d, int count) {
            const Lanes a = read(x + d, count);
            write(out + d, sizeof(T) == 1 ? a / scale : a, count);
        });
    });
}

namespace attention {

// Tokens of the next partition that one call fetches. The work on a partition calls it 20 times or more.
constexpr int TOKENS_PER_CALL = 7;

// Queries and results of all rows, each [rows][q_heads][head_dim], rows at a distance of the strides. Of a stripe the results are
// in `partials`: [rows][q_heads][partial_dim + 1].
template <class Act>
struct InOut {
    const Act* q;
    int64_t q_stride;
    Act* out;
    int64_t out_stride;
    float* partials = nullptr;
};

// One member's attention to the items of a plan.
template <class Act>
class Attention {
  public:
    Attention(Worker& w, const Plan& plan, const kv_cache& cache, const kv_batch& batch, float scale, const InOut<Act>& rows)
        : plan_(plan),
          sizes_(cache.head_dim, plan.max_rows),
          partials_(w.team.buffers[kv_team::ATTENTION_PARTIALS].as<float>()),
          cache_(cache),
          batch_(batch),
          rows_(rows),
          scores_{scale * cache.k_scale * 1.44269504f, 0} {
        if (cache.soft_cap != 0) scores_ = {scale * cache.k_scale / cache.soft_cap, cache.soft_cap * 1.44269504f};
        keys_ = w.team.buffers[kv_team::ATTENTION_PANELS].as<float>() + w.index * sizes_.each;
        values_ = keys_ + sizes_.panels;
        queries_ = reinterpret_cast<Act*>(values_ + sizes_.panels);
        float* merged = values_ + sizes_.panels + sizes_.queries;
        merged_ = sizes_.partial_at(merged, plan.max_rows);
        latest_ = sizes_.partial_at(merged + sizes_.partial, plan.max_rows);
    }

    void run(int index) {
        const int first = index ? plan_.run_ends[index - 1] : 0, end = plan_.run_ends[index];
        for (int i = first; i < end; ++i) run(plan_.tasks[i], i > first, i + 1 < end ? &plan_.tasks[i + 1] : nullptr);
    }

    // is_fetched: whether the first partition was `following` of the task before.
    void run(const Task& task, bool is_fetched, const Task* following) {
        const Item& item = plan_.items[task.item];
        load_queries(item);
        Tokens in_turns[2];
        find(task, task.first, in_turns[0]);
        for (int i = task.first; i < task.last; ++i) {
            const Tokens& tokens = in_turns[(i - task.first) % 2];
            Tokens& next = in_turns[(i - task.first + 1) % 2];
            next.count = 0;
            if (i + 1 < task.last)
                find(task, i + 1, next);
            else if (following)
                find(*following, following->first, next);
            Ahead ahead = fetch_ahead(next, TOKENS_PER_CALL, true);
            Ahead own_values = fetch_ahead(tokens, LANES, false);
            const bool in_blocks = reads_blocks<Act>(item.rows, cache_.head_dim);
            pack(tokens, !in_blocks, i == task.first && !is_fetched ? own_values : ahead, ahead);
            // Rows before the partition and rows whose window begins behind it see nothing of it.
            const int first = first_row(item, i), last = last_row(item, i);
            const bool is_first = i == item.first;
            const Partial partial = item.is_split ? partial_of(item, i) : is_first ? merged_ : latest_;
            attend_rows(item, first, last, i * PARTITION, in_blocks ? &tokens : nullptr, ahead, partial);
            if (item.is_split) continue;
            if (is_first) {
                clear(merged_, 0, first, sizes_.width);
                clear(merged_, last, item.rows, sizes_.width);
            } else
                merge(merged_, latest_, first, last, sizes_.width);
        }
        if (!item.is_split)
            for (int row = 0; row < item.rows; ++row) finish(item, row, merged_);
    }

    // Merge the results of a split item's tasks for one row.
    void finish_split(const ItemRow& split) {
        const Item& item = plan_.items[split.item];
        const int row = split.row, end = end_of(batch_, item, row / plan_.group);
        const int begin = begin_of(cache_, batch_, item, row / plan_.group);
        const int first = begin == end ? item.first : begin / PARTITION;
        const Partial partial = partial_of(item, first);
        if (begin == end) clear(partial, row, row + 1, sizes_.width);
        for (int i = first + 1; begin < end && i * PARTITION < end; ++i)
            merge(partial, partial_of(item, i), row, row + 1, sizes_.width);
        finish(item, row, partial);
    }

  private:
    Partial partial_of(const Item& item, int partition) const {
        return sizes_.partial_at(partials_ + item.partials + (partition - item.first) * sizes_.partial_size(item.rows),
                                 item.rows);
    }

    void find(const Task& task, int partition, Tokens& tokens) const {
        const Item& item = plan_.items[task.item];
        tokens.find(cache_, batch_.block_ids + batch_.first_blocks[item.entry], item.head, partition * PARTITION,
                    begin_of(cache_, batch_, item, 0), end_of(batch_, item, item.num_rows - 1));
    }

    // The first of the item's rows whose tokens end in the partition or behind it; the end of those whose tokens begin in the
    // partition or before it.
    int first_row(const Item& item, int partition) const {
        int row = 0;
        while (row < item.num_rows && end_of(batch_, item, row) <= partition * PARTITION) ++row;
        return row * plan_.group;
    }
    int last_row(const Item& item, int partition) const {
        int row = item.num_rows;
        while (row > 0 && begin_of(cache_, batch_, item, row - 1) >= (partition + 1) * PARTITION) --row;
        return row * plan_.group;
    }

    int q_head(const Item& item, int row) const { return item.head * plan_.group + row % plan_.group; }
    int64_t column(const Item& item, int row) const { return int64_t(q_head(item, row)) * cache_.head_dim; }

    void load_queries(const Item& item) {
        const int dim = cache_.head_dim;
        for (int row = 0; row < item.rows; ++row) {
            Act* to = queries_ + int64_t(row) * sizes_.width;
            const Act* from = rows_.q + (item.first_row + row / plan_.group) * rows_.q_stride + column(item, row);
            std::memcpy(to, from, dim * sizeof(Act));
            std::memset(to + dim, 0, (sizes_.width - dim) * sizeof(Act));
        }
    }

    Ahead fetch_ahead(const Tokens& tokens, int tokens_per_call, bool with_keys) const {
        const int number_bytes = cache_.dtype == KV_F32 ? 4 : cache_.dtype == KV_BF16 ? 2 : 1;
        const char* planes[] = {static_cast<const char*>(cache_.k), static_cast<const char*>(cache_.v)};
        return {tokens, {with_keys ? planes[0] : nullptr, planes[1]}, cache_.head_dim * number_bytes, number_bytes,
                tokens_per_call};
    }

    void pack(const Tokens& tokens, bool with_values, Ahead& beside_keys, Ahead& beside_values) {
        with_cache_type(cache_, [&]<class T>(T) {
            const T *k = static_cast<const T*>(cache_.k), *v = static_cast<const T*>(cache_.v);
            pack_keys<InPanel<Act, T>>(k, tokens, cache_.head_dim, beside_keys, reinterpret_cast<uint32_t*>(keys_));
            if (with_values)
                pack_values<InPanel<Act, T>>(v, tokens, cache_.head_dim, beside_values, reinterpret_cast<uint32_t*>(values_));
        });
    }

    // The item's rows [first, last) and the partition that begins at position `start`, whose values are in panels, or
    // `in_blocks`.
    void attend_rows(const Item& item, int first, int last, int start, const Tokens* in_blocks, Ahead& ahead, Partial out) {
        constexpr int ROWS = TILE_ROWS<Act>;
        const int tiles = ceil_div(last - first, ROWS);
        for (int tile = 0; tile < tiles; ++tile) {
            const int lo = first + (last - first) * tile / tiles, hi = first + (last - first) * (tile + 1) / tiles;
            int tokens_from[ROWS], tokens_seen[ROWS];
            for (int m = 0; m < hi - lo; ++m) {
                const int row = (lo + m) / plan_.group;
                tokens_from[m] = std::max(0, begin_of(cache_, batch_, item, row) - start);
                tokens_seen[m] = std::min(PARTITION, end_of(batch_, item, row) - start);
            }
            with_cache_type(cache_, [&]<class T>(T) {
                using Number = InPanel<Act, T>;
                const auto attend = [&](const auto& values) {
                    attend_tile<Number>(
                        reinterpret_cast<const uint32_t*>(keys_), values, cache_.head_dim,
                        queries_ + int64_t(lo) * sizes_.width, sizes_.width, hi - lo, tokens_from, tokens_seen, scores_, ahead,
                        Partial{out.results + int64_t(lo) * sizes_.width, out.top + lo, out.total + lo}, sizes_.width);
                };
                if constexpr (!ON_TILES<Act>)
                    if (in_blocks) return attend(BlockValues<T, Act>{static_cast<const T*>(cache_.v), *in_blocks});
                attend(PanelValues<Number, Act>{reinterpret_cast<const uint32_t*>(values_)});
            });
        }
    }

    void finish(const Item& item, int row, Partial from) {
        float total = from.total[row];
        const float* x = from.results + int64_t(row) * sizes_.width;
        const int64_t to_row = item.first_row + row / plan_.group;
        if (rows_.partials) {
            const int dim = batch_.partial_dim;
            const int64_t at = to_row * plan_.group * cache_.kv_heads + q_head(item, row);
            float* out = rows_.partials + at * (dim + 1);
            out[dim] = total == 0 ? -__builtin_inff() : (from.top[row] + std::log2(total)) * 0.69314718f;
            return put_scaled(x, total == 0 ? 0 : cache_.v_scale / total, dim, out);
        }
        if (cache_.sinks) total += std::exp2(cache_.sinks[q_head(item, row)] * 1.44269504f - from.top[row]);
        put_scaled(x, cache_.v_scale / total, cache_.head_dim, rows_.out + to_row * rows_.out_stride + column(item, row));
    }

    template <class Out>
    static void put_scaled(const float* x, float factor, int dim, Out* out) {
        for_lanes(dim, [&](int d, int count) { write(out + d, load(x + d) * splat(factor), count); });
    }

    const Plan& plan_;
    const Sizes sizes_;
    float* partials_;  // of split items
    const kv_cache& cache_;
    const kv_batch& batch_;
    const InOut<Act> rows_;
    Scores scores_;
    float *keys_, *values_;
    Act* queries_;
    Partial merged_, latest_;
};

}  // namespace attention

// Causal attention of all rows of the batch, whose K and V are in the cache. Act is float or bf16.
template <class Act>
void attend(Worker& w, const attention::Plan& plan, const kv_cache& cache, const kv_batch& batch, float scale,
            const attention::InOut<Act>& rows) {
    attention::Attention<Act> attention(w, plan, cache, batch, scale, rows);
    w.for_each(int(plan.run_ends.size()), [&](int i) { attention.run(i); });
    const int split = int(plan.split_rows.size());
    if (split) w.for_each(split, [&](int i) { attention.finish_split(plan.split_rows[i]); });
}

}  // namespace KV_VARIANT
