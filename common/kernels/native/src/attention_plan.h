// How one step's attention is shared out among the team.
#pragma once
#include <algorithm>

#include "attention_tiles.h"
#include "team.h"

namespace KV_VARIANT::attention {

// The query heads of some rows of one entry that share a KV head. Its `rows` are row-major: heads vary fastest.
struct Item {
    int32_t entry, head, first_row, num_rows, seen;  // seen: by its first row
    int32_t rows, first, partitions, is_split;       // its partitions: [first, first + partitions)
    int64_t partials;  // where its partials begin if it is split, in floats
};
struct Task {
    int32_t item, first, last;  // partitions
};

// Sizes of scratch memory, in floats, rounded up to whole cache lines.
struct Sizes {
    int64_t panels, queries, partial, each;  // each: of one member of the team
    int width;                               // of a row's results

    Sizes(int dim, int rows) {
        width = round_up(dim, PANEL);
        panels = int64_t(PARTITION) * width;  // enough for either type of words
        queries = int64_t(rows) * width;
        partial = partial_size(rows);
        each = 2 * panels + queries + 2 * partial;
    }
    int64_t partial_size(int rows) const { return int64_t(rows) * width + 2 * round_up(rows, LANES); }
    Partial partial_at(float* memory, int rows) const {
        float* top = memory + int64_t(rows) * width;
        return {memory, top, top + round_up(rows, LANES)};
    }
};

struct Plan {
    int32_t group, num_items, num_tasks, num_runs, num_split_rows, max_rows;
    int64_t partials;
    Item* items;
    Task* tasks;
    Task* split_rows;  // item; first: the row
    int32_t* run_ends;  // A run of tasks is one member's: it fetches a task's first partition while it works on the last's.
};

// The first position that the row attends to which sees `seen` tokens in all, those before its window included.
inline int seen_from(const kv_cache& cache, int seen) { return cache.window ? std::max(0, seen - cache.window) : 0; }

// Item's row i attends to positions [begin_of, end_of) of its entry's blocks, in a stripe perhaps to none.
inline int end_of(const kv_batch& batch, const Item& item, int row) {
    return batch.row_ends ? batch.row_ends[item.first_row + row] : item.seen + row;
}
inline int begin_of(const kv_cache& cache, const kv_batch& batch, const Item& item, int row) {
    return batch.row_starts ? batch.row_starts[item.first_row + row] : seen_from(cache, item.seen + row);
}

constexpr int MOST_ROWS = 192, FEWEST_ROWS = 24, MOST_NUMBERS = 24576;
constexpr int TASKS_PER_MEMBER = 4;

class Planner {
  public:
    Planner(kv_team& team, const kv_cache& cache, const kv_batch& batch, int q_heads)
        : team_(team), cache_(cache), batch_(batch), group_(q_heads / cache.kv_heads), sizes_(cache.head_dim, 1) {
        const int most = std::max(FEWEST_ROWS, std::min(MOST_ROWS, MOST_NUMBERS / sizes_.width));
        const int64_t share = int64_t(batch.num_rows) * q_heads / (TASKS_PER_MEMBER * team.size());
        rows_per_item_ = std::max(1, int(std::max<int64_t>(FEWEST_ROWS, std::min<int64_t>(most, share))) / group_);
    }

    void plan() {
        count();
        team_.buffers[kv_team::ATTENTION_PLAN].reserve(sizeof(Plan) + num_items_ * sizeof(Item) +
                                                       (num_tasks_ + num_split_rows_) * sizeof(Task) +
                                                       num_tasks_ * sizeof(int32_t));
        Plan& plan = *team_.buffers[kv_team::ATTENTION_PLAN].as<Plan>();
        plan = {};
        plan.group = group_;
        plan.items = reinterpret_cast<Item*>(&plan + 1);
        plan.tasks = reinterpret_cast<Task*>(plan.items + num_items_);
        plan.split_rows = plan.tasks + num_tasks_;
        plan.run_ends = reinterpret_cast<int32_t*>(plan.split_rows + num_split_rows_);
        for_each_item([&](Item item) { add(plan, item); });
        join(plan);
        team_.buffers[kv_team::ATTENTION_PARTIALS].reserve(plan.partials * sizeof(float));
        const Sizes sizes(cache_.head_dim, max_rows_);
        plan.max_rows = max_rows_;
        team_.buffers[kv_team::ATTENTION_PANELS].reserve(team_.size() * sizes.each * sizeof(float));
    }

  private:
    template <class F>
    void for_each_item(const F& f) {
        for (int entry = 0; entry < batch_.num_entries; ++entry) {
            const int lo = batch_.first_rows[entry], hi = batch_.first_rows[entry + 1];
            const int blocks = (hi - lo + rows_per_item_ - 1) / rows_per_item_;
            // The last rows see most: their items are the largest and come first.
            for (int block = blocks; block-- > 0;)
                for (int head = 0; head < cache_.kv_heads; ++head) {
                    Item item{};
                    item.entry = entry;
                    item.head = head;
                    item.first_row = lo + block * rows_per_item_;
                    item.num_rows = std::min(rows_per_item_, hi - item.first_row);
                    item.seen = batch_.context_lens[entry] - (hi - item.first_row) + 1;
                    item.rows = item.num_rows * group_;
                    item.first = begin_of(cache_, batch_, item, 0) / PARTITION;
                    const int end = (end_of(batch_, item, item.num_rows - 1) + PARTITION - 1) / PARTITION;
                    item.partitions = std::max(1, end - item.first);
                    f(item);
                }
        }
    }

    static int64_t cost(const Item& item) { return int64_t(item.partitions) * (item.rows / MAX_ROWS + 1); }

    // Partitions for each task of an item: all, unless that is too large a part of the step's work.
    int span(const Item& item) const {
        if (item.rows > FEWEST_ROWS || cost(item) <= share_) return item.partitions;
        return std::max<int64_t>(1, share_ * item.partitions / cost(item));
    }

    void count() {
        for_each_item([&](const Item& item) {
            total_ += cost(item);
            ++num_items_;
            max_rows_ = std::max(max_rows_, item.rows);
        });
        share_ = team_.size() == 1 ? total_ : total_ / (TASKS_PER_MEMBER * team_.size());
        for_each_item([&](const Item& item) {
            const int tasks = (item.partitions + span(item) - 1) / span(item);
            num_tasks_ += tasks;
            if (tasks > 1) num_split_rows_ += item.rows;
        });
    }

    void add(Plan& plan, Item item) {
        const int step = span(item);
        item.is_split = step < item.partitions;
        item.partials = plan.partials;
        const int end = item.first + item.partitions;
        for (int first = item.first; first < end; first += step)
            plan.tasks[plan.num_tasks++] = {plan.num_items, first, std::min(first + step, end)};
        if (item.is_split) {
            plan.partials += item.partitions * sizes_.partial_size(item.rows);
            for (int row = 0; row < item.rows; ++row) plan.split_rows[plan.num_split_rows++] = {plan.num_items, row, 0};
        }
        plan.items[plan.num_items++] = item;
    }

    // Runs become shorter towards the end, so that all members end together.
    void join(Plan& plan) const {
        int64_t left = total_, joined = 0;
        for (int i = 0; i < plan.num_tasks; ++i) {
            const Task& task = plan.tasks[i];
            const Item& item = plan.items[task.item];
            joined += cost(item) * (task.last - task.first) / item.partitions;
            if (i + 1 < plan.num_tasks && joined < left / (2 * team_.size())) continue;
            plan.run_ends[plan.num_runs++] = i + 1;
            left -= joined;
            joined = 0;
        }
    }

    kv_team& team_;
    const kv_cache& cache_;
    const kv_batch& batch_;
    int group_, rows_per_item_;
    Sizes sizes_;
    int num_items_ = 0, num_tasks_ = 0, num_split_rows_ = 0, max_rows_ = 0;
    int64_t total_ = 0, share_ = 0;
};

}  // namespace KV_VARIANT::attention
