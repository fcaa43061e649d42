// Products of rows with packed weights on matrix units. Tiles add up a row's products in steps of 64 bytes of it, in the order of
// the inputs: a row's result does not depend on the other rows.
#pragma once
#include "linear.h"
#include "tiles.h"
#ifdef KV_HAS_TILES

namespace KV_VARIANT {

constexpr int TILED_ROWS = tiles::BLOCKS * tiles::ROWS;
constexpr int STEP_BYTES = tiles::UNITS * PANEL * 4;  // of a panel
constexpr int STEPS_AHEAD = 8;  // fetched before the one in use, where few rows stream through all weights

// Fetches LINES cache lines of weights in each step.
template <int LINES>
struct FetchLines {
    const char* next;

    KV_INLINE void operator()() {
#pragma GCC unroll 32
        for (int i = 0; i < LINES; ++i) __builtin_prefetch(next + i * CACHE_LINE, 0, NEAR);
        next += LINES * CACHE_LINE;
    }
};

// A panel in whole steps. The rest of its last step is copied, with zeros behind it.
struct SteppedPanel {
    const char* whole;
    int steps, row_bytes;  // row_bytes: of all inputs
    bool has_rest;
    alignas(CACHE_LINE) char rest[STEP_BYTES];

    SteppedPanel(const char* panel, int64_t panel_bytes, int row_bytes)
        : whole(panel), steps(int(panel_bytes / STEP_BYTES)), row_bytes(row_bytes), has_rest(panel_bytes % STEP_BYTES) {
        if (!has_rest) return;
        std::memset(rest, 0, sizeof rest);
        std::memcpy(rest, panel + int64_t(steps) * STEP_BYTES, panel_bytes % STEP_BYTES);
    }
};

// sums: [num_rows][32] = the products of up to 32 rows with a panel, as float or int32.
template <tiles::Kind KIND, bool HAS_TWO, class F>
void multiply_by_tiles(const SteppedPanel& panel, const char* rows, int64_t stride, int num_rows, F fetch, char* sums) {
    tiles::clear_sums<HAS_TWO>();
    tiles::add_steps<KIND, HAS_TWO>(rows, stride, panel.whole, panel.steps, fetch);
    if (panel.has_rest) {
        alignas(CACHE_LINE) char rest[TILED_ROWS][tiles::ROW_BYTES] = {};
        const int64_t begin = int64_t(panel.steps) * tiles::ROW_BYTES;
        for (int m = 0; m < num_rows; ++m) std::memcpy(rest[m], rows + m * stride + begin, panel.row_bytes - begin);
        NoFetch none;
        tiles::add_steps<KIND, HAS_TWO>(rest[0], tiles::ROW_BYTES, panel.rest, 1, none);
    }
    tiles::store_sums<HAS_TWO>(sums, PANEL * 4);
}

// One panel by `num_rows` rows from `row` on: up to 32 or a multiple of 32. The first two products fetch the next panel.
template <tiles::Kind KIND, class T, class Finish>
void multiply_rows_by_tiles(const kv_linear& l, int panel_index, const SteppedPanel& panel, Rows<T> rows, const Output& output,
                            int row, int num_rows, const Finish& finish) {
    alignas(CACHE_LINE) char sums[TILED_ROWS * PANEL * 4];
    const int64_t stride = rows.stride * int64_t(sizeof(T));
    const auto multiply = [&](int first, int count, auto fetch) {
        const char* x = reinterpret_cast<const char*>(rows[first]);
        const auto function = count > tiles::ROWS ? &multiply_by_tiles<KIND, true, decltype(fetch)>
                                                  : &multiply_by_tiles<KIND, false, decltype(fetch)>;
        function(panel, x, stride, count, fetch, sums);
        finish(first, count, sums);
        put(l, output, panel_index, first, count, reinterpret_cast<const float*>(sums));
    };
    if (num_rows <= TILED_ROWS)
        return multiply(row, num_rows, FetchLines<STEP_BYTES / CACHE_LINE>{panel.whole + STEPS_AHEAD * STEP_BYTES});
    const char* next = panel.whole + int64_t(panel.steps) * STEP_BYTES;
    for (int done = 0; done < num_rows; done += TILED_ROWS)
        if (done < 2 * TILED_ROWS)
            multiply(row + done, TILED_ROWS,
                     FetchLines<STEP_BYTES / CACHE_LINE / 2>{next + (done ? panel.steps * STEP_BYTES / 2 : 0)});
        else
            multiply(row + done, TILED_ROWS, NoFetch{});
}

// Groups of panels by blocks of rows, shared out among the team: a block stays in the second-level cache while the weights of
// a group stream through. finish(panel, row, rows, sums) turns integer sums into floats.
template <tiles::Kind KIND, class T, class Finish>
void multiply_by_tiles(Worker& w, const kv_linear& l, int64_t panel_bytes, Rows<T> rows, const Output& output, int num_rows,
                       const Finish& finish) {
    constexpr int CHUNKS_PER_MEMBER = 8, MOST_PANELS = 8, BLOCK_BYTES = 1 << 20, FEWEST = 3, MOST = 16;
    const int row_bytes = l.in * int(sizeof(T));
    const int block_rows = std::clamp(BLOCK_BYTES / row_bytes / TILED_ROWS, FEWEST, MOST) * TILED_ROWS;
    const int panels = num_panels(l), blocks = ceil_div(num_rows, block_rows);
    const int wanted = CHUNKS_PER_MEMBER * w.team.size();
    const int per_chunk = std::clamp(panels * blocks / wanted, 1, MOST_PANELS);
    const int chunks = ceil_div(panels, per_chunk);
    w.for_each(chunks * blocks, [&](int task) {
        const int first = task % chunks * per_chunk, lo = task / chunks * block_rows;
        const int last = std::min(first + per_chunk, panels), hi = std::min(lo + block_rows, num_rows);
        tiles::Shapes shapes;
        for (int row = lo, end; row < hi; row = end) {
            const int whole = (hi - row) / TILED_ROWS * TILED_ROWS;
            end = whole ? row + whole : hi;
            shapes.set(whole ? TILED_ROWS : end - row);
            for (int p = first; p < last; ++p) {
                const SteppedPanel panel(static_cast<const char*>(l.weight) + p * panel_bytes, panel_bytes, row_bytes);
                multiply_rows_by_tiles<KIND>(l, p, panel, rows, output, row, end - row,
                                             [&](int at, int count, char* sums) { finish(p, at, count, sums); });
            }
        }
    });
}

inline void product(Worker& w, const kv_linear& l, const bf16* x, int64_t stride, const Output& output, int num_rows) {
    multiply_by_tiles<tiles::BF16>(w, l, ShiftedWeights::panel_bytes(l), Rows<bf16>{x, stride}, output, num_rows,
                                   [](int, int, int, char*) {});
}

}  // namespace KV_VARIANT
#endif
