// Paged attention straight from the KV blocks. The context is cut into partitions of a fixed size; softmax is taken over
// each, and their results are merged in the order of positions. So a row's result is a function of its query and its
// context: the batch, the cut of a prompt into chunks and the number of threads do not change it.
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
inline void put_head(const kv_cache& cache, int plane, int64_t slot, int head, const float* x) {
    const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
    const int64_t at = ((block * cache.kv_heads + head) * cache.block_size + offset) * cache.head_dim;
    with_cache_type(cache, [&](auto number) {
        auto* out = static_cast<decltype(number)*>(plane ? cache.v : cache.k) + at;
        const Lanes scale = splat(plane ? cache.v_scale : cache.k_scale);
        for (int d = 0; d < cache.head_dim; d += LANES) {
            const int count = cache.head_dim - d < LANES ? cache.head_dim - d : LANES;
            Lanes a = load_some(x + d, count);
            if constexpr (sizeof number == 1) a = a / scale;
            store_some(out + d, a, count);
        }
    });
}

// Called outside of run(), before `attend`.
inline void reserve_attention(kv_team& team, const kv_cache& cache, const kv_batch& batch, int q_heads) {
    attention::Planner(team, cache, batch, q_heads).plan();
}

namespace attention {

// Of the next partition, fetched at each of 20 points or more of the work on this one.
constexpr int TOKENS_PER_CALL = 7;

// One member's attention to the items of a plan.
template <class Act>
class Attention {
  public:
    Attention(Worker& w, const kv_cache& cache, const kv_batch& batch, float scale, const Act* q, int64_t q_stride,
              Act* out, int64_t out_stride, float* partials)
        : plan_(*w.team.buffers[kv_team::ATTENTION_PLAN].as<Plan>()),
          sizes_(cache.head_dim, plan_.max_rows),
          partials_(w.team.buffers[kv_team::ATTENTION_PARTIALS].as<float>()),
          cache_(cache),
          batch_(batch),
          scores_{scale * cache.k_scale * 1.44269504f, 0},
          q_(q),
          out_(out),
          q_stride_(q_stride),
          out_stride_(out_stride),
          partials_out_(partials),
          q_heads_(plan_.group * cache.kv_heads) {
        if (cache.soft_cap != 0) scores_ = {scale * cache.k_scale / cache.soft_cap, cache.soft_cap * 1.44269504f};
        keys_ = w.team.buffers[kv_team::ATTENTION_PANELS].as<float>() + w.index * sizes_.each;
        values_ = keys_ + sizes_.panels;
        queries_ = reinterpret_cast<Act*>(values_ + sizes_.panels);
        float* merged = values_ + sizes_.panels + sizes_.queries;
        merged_ = sizes_.partial_at(merged, plan_.max_rows);
        latest_ = sizes_.partial_at(merged + sizes_.partial, plan_.max_rows);
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
            // Rows whose position lies before the partition see nothing of it, nor do those whose window begins behind it.
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

    // Merge what the tasks of a split item gave for one row.
    void finish_split(const Task& split) {
        const Item& item = plan_.items[split.item];
        const int row = split.first, end = end_of(batch_, item, row / plan_.group);
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

    int64_t column(const Item& item, int row) const {
        return int64_t(item.head * plan_.group + row % plan_.group) * cache_.head_dim;
    }

    void load_queries(const Item& item) {
        const int dim = cache_.head_dim;
        for (int row = 0; row < item.rows; ++row) {
            Act* to = queries_ + int64_t(row) * sizes_.width;
            std::memcpy(to, q_ + (item.first_row + row / plan_.group) * q_stride_ + column(item, row), dim * sizeof(Act));
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
        with_cache_type(cache_, [&](auto number) {
            using T = decltype(number);
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
        const int tiles = (last - first + ROWS - 1) / ROWS;
        for (int tile = 0; tile < tiles; ++tile) {
            const int lo = first + (last - first) * tile / tiles, hi = first + (last - first) * (tile + 1) / tiles;
            int tokens_from[ROWS], tokens_seen[ROWS];
            for (int m = 0; m < hi - lo; ++m) {
                const int row = (lo + m) / plan_.group;
                tokens_from[m] = std::max(0, begin_of(cache_, batch_, item, row) - start);
                tokens_seen[m] = std::min(PARTITION, end_of(batch_, item, row) - start);
            }
            with_cache_type(cache_, [&](auto number) {
                using T = decltype(number);
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
        if (partials_out_) {
            const int64_t at = int64_t(item.first_row + row / plan_.group) * q_heads_ + item.head * plan_.group + row % plan_.group;
            return finish_partial(x, from.top[row], total, partials_out_ + at * (batch_.partial_dim + 1));
        }
        if (cache_.sinks)
            total += std::exp2(cache_.sinks[item.head * plan_.group + row % plan_.group] * 1.44269504f - from.top[row]);
        const Lanes factor = splat(cache_.v_scale / total);
        Act* to = out_ + (item.first_row + row / plan_.group) * out_stride_ + column(item, row);
        for (int d = 0; d < cache_.head_dim; d += LANES)
            store_some(to + d, load(x + d) * factor, std::min(LANES, cache_.head_dim - d));
    }

    // out: [partial_dim + 1]
    void finish_partial(const float* x, float top, float total, float* out) const {
        const int dim = batch_.partial_dim;
        const Lanes factor = splat(total == 0 ? 0 : cache_.v_scale / total);
        for (int d = 0; d < dim; d += LANES) store_some(out + d, load(x + d) * factor, std::min(LANES, dim - d));
        out[dim] = total == 0 ? -__builtin_inff() : (top + std::log2(total)) * 0.69314718f;
    }

    const Plan& plan_;
    const Sizes sizes_;
    float* partials_;
    const kv_cache& cache_;
    const kv_batch& batch_;
    Scores scores_;
    const Act* q_;
    Act* out_;
    int64_t q_stride_, out_stride_;
    float* partials_out_;  // of a stripe
    int q_heads_;
    float *keys_, *values_;
    Act* queries_;
    Partial merged_, latest_;
};

}  // namespace attention

// Causal attention of all rows of the batch, whose K and V are in the cache. q, out: [rows][q_heads][head_dim], rows at a
// distance of the strides. Act is float or bf16. Of a stripe the results are in `partials`, not in `out`.
template <class Act>
void attend(Worker& w, const kv_cache& cache, const kv_batch& batch, float scale, const Act* q, int64_t q_stride, Act* out,
            int64_t out_stride, float* partials = nullptr) {
    attention::Attention<Act> attention(w, cache, batch, scale, q, q_stride, out, out_stride, partials);
    const attention::Plan& plan = *w.team.buffers[kv_team::ATTENTION_PLAN].as<attention::Plan>();
    w.for_each(plan.num_runs, [&](int i) { attention.run(i); });
    if (plan.num_split_rows) w.for_each(plan.num_split_rows, [&](int i) { attention.finish_split(plan.split_rows[i]); });
}

}  // namespace KV_VARIANT
