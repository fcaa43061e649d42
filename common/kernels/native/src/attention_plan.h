// How one step's attention is shared out among the team.
#pragma once
#include <algorithm>
#include <vector>

#include "attention_tiles.h"
#include "team.h"

namespace KV_VARIANT::attention {

// The query heads of some rows of one entry that share a KV head. Its `rows` are row-major: heads vary fastest.
struct Item {
    int32_t entry, head, first_row, num_rows, seen;  // seen: tokens that its first row sees
    int32_t rows, first, partitions;                 // partitions: [first, first + partitions)
    bool is_split = false;  // among several tasks
    int64_t partials = 0;   // of a split item: where its partial results begin, in floats

    int64_t cost() const { return int64_t(partitions) * (rows / MAX_ROWS + 1); }
};
struct Task {
    int32_t item, first, last;  // partitions [first, last)
};
struct ItemRow {
    int32_t item, row;
};

// Sizes of scratch memory, in floats, rounded up to whole cache lines.
struct Sizes {
    int64_t panels, queries, partial, each;  // each: all of these, for one member of the team
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

// The first position that a row attends to. seen: all tokens up to the row, with those before its window.
inline int seen_from(const kv_cache& cache, int seen) { return cache.window ? std::max(0, seen - cache.window) : 0; }

// A row of an item attends to positions [begin_of, end_of) of its entry's blocks; in a stripe there may be none.
inline int end_of(const kv_batch& batch, const Item& item, int row) {
    return batch.row_ends ? batch.row_ends[item.first_row + row] : item.seen + row;
}
inline int begin_of(const kv_cache& cache, const kv_batch& batch, const Item& item, int row) {
    return batch.row_starts ? batch.row_starts[item.first_row + row] : seen_from(cache, item.seen + row);
}

constexpr int MOST_ROWS = 192, FEWEST_ROWS = 24, MOST_NUMBERS = 24576;
constexpr int TASKS_PER_MEMBER = 4;

// What the members of a team do for one batch; made before they run.
struct Plan {
    const int group;
    int max_rows = 0;      // of an item
    int64_t partials = 0;  // of all split items, in floats
    std::vector<Item> items;
    std::vector<Task> tasks;
    std::vector<ItemRow> split_rows;
    // A run of tasks is one member's: it fetches a task's first partition while it works on the last one of the task before.
    std::vector<int32_t> run_ends;

    Plan(kv_team& team, const kv_cache& cache, const kv_batch& batch, int q_heads) : group(q_heads / cache.kv_heads) {
        const Sizes sizes(cache.head_dim, 1);
        const int most = std::max(FEWEST_ROWS, std::min(MOST_ROWS, MOST_NUMBERS / sizes.width));
        const int64_t share = int64_t(batch.num_rows) * q_heads / (TASKS_PER_MEMBER * team.size());
        const int rows = int(std::max<int64_t>(FEWEST_ROWS, std::min<int64_t>(most, share)));
        const int64_t cost = add_items(cache, batch, std::max(1, rows / group));
        const int64_t cost_share = team.size() == 1 ? cost : cost / (TASKS_PER_MEMBER * team.size());
        tasks.reserve(items.size());
        for (int i = 0; i < int(items.size()); ++i) add_tasks(i, cost_share, sizes);
        join_tasks(team.size(), cost);
        team.buffers[kv_team::ATTENTION_PARTIALS].reserve(partials * sizeof(float));
        team.buffers[kv_team::ATTENTION_PANELS].reserve(team.size() * Sizes(cache.head_dim, max_rows).each * sizeof(float));
    }

  private:
    // Returns the cost of all items.
    int64_t add_items(const kv_cache& cache, const kv_batch& batch, int rows_per_item) {
        int64_t cost = 0;
        items.reserve((batch.num_rows / rows_per_item + batch.num_entries) * cache.kv_heads);
        for (int entry = 0; entry < batch.num_entries; ++entry) {
            const int lo = batch.first_rows[entry], hi = batch.first_rows[entry + 1];
            // The last rows see most: their items are the largest and come first.
            for (int block = ceil_div(hi - lo, rows_per_item); block-- > 0;)
                for (int head = 0; head < cache.kv_heads; ++head) {
                    const int first_row = lo + block * rows_per_item, num_rows = std::min(rows_per_item, hi - first_row);
                    const int seen = batch.context_lens[entry] - (hi - first_row) + 1;
                    Item item{entry, head, first_row, num_rows, seen, num_rows * group, 0, 1};
                    item.first = begin_of(cache, batch, item, 0) / PARTITION;
                    item.partitions = std::max(1, ceil_div(end_of(batch, item, num_rows - 1), PARTITION) - item.first);
                    cost += item.cost();
                    max_rows = std::max(max_rows, item.rows);
                    items.push_back(item);
                }
        }
        return cost;
    }

    // A task takes all partitions of an item, unless these are too large a part of the step's work. share: a task's part of it.
    void add_tasks(int index, int64_t share, const Sizes& sizes) {
        Item& item = items[index];
        const bool is_whole = item.rows > FEWEST_ROWS || item.cost() <= share;
        const int step = is_whole ? item.partitions : int(std::max<int64_t>(1, share * item.partitions / item.cost()));
        const int end = item.first + item.partitions;
        for (int first = item.first; first < end; first += step) tasks.push_back({index, first, std::min(first + step, end)});
        if (step == item.partitions) return;
        item.is_split = true;
        item.partials = partials;
        partials += item.partitions * sizes.partial_size(item.rows);
        for (int row = 0; row < item.rows; ++row) split_rows.push_back({index, row});
    }

    // Runs become shorter towards the end, so that all members end together.
    void join_tasks(int members, int64_t left) {
        int64_t joined = 0;
        for (int i = 0; i < int(tasks.size()); ++i) {
            const Item& item = items[tasks[i].item];
            joined += item.cost() * (tasks[i].last - tasks[i].first) / item.partitions;
            if (i + 1 < int(tasks.size()) && joined < left / (2 * members)) continue;
            run_ends.push_back(i + 1);
            left -= joined;
            joined = 0;
        }
    }
};

}  // namespace KV_VARIANT::attention
