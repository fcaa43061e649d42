// The experts of a mixture. Rows are sorted by expert. Experts follow one another, each shared out among the team; if there are
// enough of them, each is computed by one member, without barriers. Only weights of chosen experts are read.
#pragma once
#include "quantized.h"
#include "rows.h"

namespace KV_VARIANT {

// The rows of each expert. A pick is a row and one of its experts on this rank; picks are sorted by expert.
struct Picks {
    int count;
    const int32_t* starts;  // [num_experts + 1]: the first pick of each expert
    const int32_t* rows;    // [count]
    const int32_t* places;  // [rows][top_k]: the pick; -1 if the expert is on another rank
};

// Most picks in scratch memory; a step with more is cut.
constexpr int MOST_PICKS = 4096;

// The slot that computes the next row of an expert; `ExpertSlots.choose` in common/model/mixture/slots.py does the same.
inline int64_t next_slot(const kv_experts& e, int64_t expert) {
    return e.slots ? e.slots[expert * e.slot_stride + e.counts[expert]++ % e.replicas[expert]] : expert;
}

// Called outside of run(). The plan lies in a buffer of the team.
inline Picks sort_by_expert(kv_team& team, const kv_experts& e, const kv_choice& choice) {
    const int all = choice.rows * choice.top_k;
    team.buffers[kv_team::EXPERT_PLAN].reserve(sizeof(int32_t) * (e.num_experts + 1 + 2 * size_t(all)));
    int32_t* starts = team.buffers[kv_team::EXPERT_PLAN].as<int32_t>();
    int32_t* rows = starts + e.num_experts + 1;
    int32_t* places = rows + all;
    std::fill_n(starts, e.num_experts + 1, 0);
    for (int i = 0; i < all; ++i) {
        const int64_t slot = next_slot(e, choice.experts[i]) - e.first;
        places[i] = slot >= 0 && slot < e.num_experts ? int(slot) : -1;
        if (places[i] >= 0) ++starts[places[i] + 1];
    }
    for (int i = 0; i < e.num_experts; ++i) starts[i + 1] += starts[i];
    // Each start runs to the end of its expert, which is the next one's start, and is moved back afterwards.
    for (int i = 0; i < all; ++i) {
        if (places[i] < 0) continue;
        places[i] = starts[places[i]]++;
        rows[places[i]] = i / choice.top_k;
    }
    for (int i = e.num_experts; i > 0; --i) starts[i] = starts[i - 1];
    starts[0] = 0;
    return {starts[e.num_experts], starts, rows, places};
}

// How experts are shared out.
struct ExpertShares {
    bool are_whole;                       // each expert is on one member
    size_t own_bytes[kv_team::NUM_USES];  // of such a member, in each buffer
};

// Called outside of run(), before `multiply_experts`.
inline ExpertShares reserve_experts(kv_team& team, const kv_experts& e, const Picks& picks) {
    ExpertShares shares{};
    int most = 0;
    for (int i = 0; i < e.num_experts; ++i) {
        const int count = picks.starts[i + 1] - picks.starts[i];
        if (!count) continue;
        most = std::max(most, count);
        for (const kv_linear* l : {&e.gate_up[i], &e.down[i]}) {
            reserve_linear(team, *l, count);
            const auto needs = [&](kv_team::Use use, size_t bytes) {
                size_t& own = shares.own_bytes[use];
                own = std::max(own, (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
            };
            needs(kv_team::CODES, codes_bytes(*l, count));
            needs(kv_team::SUMS, sums_bytes(*l, count));
            needs(kv_team::PARTIAL, expanded_bytes(*l));
        }
    }
    // The most loaded expert is then no more than half of a member's share.
    shares.are_whole = team.size() > 1 && 2 * most * team.size() <= picks.count;
    if (shares.are_whole)
        for (int use = 0; use < kv_team::NUM_USES; ++use)
            if (shares.own_bytes[use]) team.buffers[use].reserve(shares.own_bytes[use] * size_t(team.size()));
    return shares;
}

// Scratch rows of each pick, at distances of `hidden_stride` and `inner_stride` numbers.
template <class Act>
struct PickRows {
    Act* x;
    Act* inner;
    float* y;
    int64_t hidden_stride, inner_stride;
};

// out: [rows][hidden] = the weighted sum of the outputs of each row's experts, in the order of its choice.
template <class Model, class Act>
void multiply_experts(Worker& w, const kv_experts& e, const kv_choice& choice, const Picks& picks, const ExpertShares& shares,
                      const Model* x, const PickRows<Act>& scratch, float* out) {
    const int hidden = e.hidden;
    const int64_t stride = scratch.hidden_stride;
    w.for_each(picks.count, [&](int i) {
        const Model* from = x + int64_t(picks.rows[i]) * hidden;
        copy(from, hidden, scratch.x + i * stride);
    });
    const auto multiply = [&](Worker& by, int i) {
        const int first = picks.starts[i], count = picks.starts[i + 1] - first;
        if (!count) return;
        Act* inner = scratch.inner + first * scratch.inner_stride;
        const Output gated{inner, dtype_of<Act>(), scratch.inner_stride, e.gate};
        linear<Model>(by, e.gate_up[i], scratch.x + first * stride, stride, gated, count);
        linear<Model>(by, e.down[i], inner, scratch.inner_stride, {scratch.y + first * stride, KV_F32, stride}, count);
    };
    if (shares.are_whole) {
        Worker alone{w.team, w.index, w.generation, shares.own_bytes};
        w.for_each(e.num_experts, [&](int i) { multiply(alone, i); });
    } else {
        for (int i = 0; i < e.num_experts; ++i) multiply(w, i);
    }
    constexpr int PART = 512;
    const int parts = ceil_div(hidden, PART);
    w.for_each(choice.rows * parts, [&](int task) {
        const int row = task / parts, from = task % parts * PART;
        for_lanes(std::min(hidden - from, PART), [&](int k, int count) {
            Lanes sum = zeros();
            for (int j = row * choice.top_k; j < (row + 1) * choice.top_k; ++j)
                if (picks.places[j] >= 0)
                    sum = multiply_add(choice.weights[j], read(scratch.y + picks.places[j] * stride + from + k, count), sum);
            write(out + int64_t(row) * hidden + from + k, sum, count);
        });
    });
}

}  // namespace KV_VARIANT
