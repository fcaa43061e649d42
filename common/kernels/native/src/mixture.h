// The router of a mixture: which experts compute a row, and the weights of their outputs.
#pragma once
#include <cmath>

#include "experts.h"

namespace KV_VARIANT {

// Arrays of [num_experts] for a row's routing: scores (at first logits), the numbers that experts are chosen by, scores of groups,
// and numbers of groups.
constexpr int ROUTER_PARTS = 4;

// best: [count] = the places of the highest of n numbers, the highest first; of equal numbers the first one.
template <class Index>
void find_highest(const float* x, int n, int count, Index* best) {
    int found = 0;
    for (int i = 0; i < n; ++i) {
        if (found == count && !(x[i] > x[best[count - 1]])) continue;
        int at = found < count ? found++ : count - 1;
        for (; at > 0 && x[i] > x[best[at - 1]]; --at) best[at] = best[at - 1];
        best[at] = Index(i);
    }
}

// x = e^(x - highest) / their sum.
inline void softmax(float* x, int n, float highest) {
    const Lanes top = splat(highest);
    float total = 0;
    for_lanes(n, [&](int i, int count) {
        const Lanes powers = exp(read(x + i, count) - top);
        write(x + i, powers, count);
        for (int k = 0; k < count; ++k) total += x[i + k];
    });
    for (int i = 0; i < n; ++i) x[i] /= total;
}

// Sets choice, [num_experts], to minus infinity outside of the best groups. group_scores: [num_groups], numbers: [num_experts],
// both scratch.
inline void keep_best_groups(const kv_router& r, float* choice, float* group_scores, int32_t* numbers) {
    const int size = r.num_experts / r.num_groups, counted = std::min(r.group_score_of, size);
    for (int g = 0; g < r.num_groups; ++g) {
        find_highest(choice + g * size, size, counted, numbers);
        group_scores[g] = 0;
        for (int i = 0; i < counted; ++i) group_scores[g] += choice[g * size + numbers[i]];
    }
    find_highest(group_scores, r.num_groups, r.groups_kept, numbers);
    for (int g = 0; g < r.num_groups; ++g)
        if (std::find(numbers, numbers + r.groups_kept, g) == numbers + r.groups_kept)
            std::fill_n(choice + g * size, size, -INFINITY);
}

// Chooses a row's experts. parts: [ROUTER_PARTS][num_experts], the row's logits first. experts, weights: [top_k].
inline void route_row(const kv_router& r, float* parts, int64_t* experts, float* weights) {
    const int n = r.num_experts;
    float *scores = parts, *choice = parts + n;
    if (r.scores == KV_SOFTMAX_OF_CHOSEN) {
        find_highest(scores, n, r.top_k, experts);
        for (int i = 0; i < r.top_k; ++i) weights[i] = scores[experts[i]];
        softmax(weights, r.top_k, weights[0]);
    } else {
        if (r.scores == KV_SIGMOID)
            for_lanes(n, [&](int i, int count) {
                write(scores + i, splat(1.0f) / (splat(1.0f) + exp(zeros() - read(scores + i, count))), count);
            });
        else
            softmax(scores, n, *std::max_element(scores, scores + n));
        for (int i = 0; i < n; ++i) choice[i] = scores[i] + (r.selection_bias ? r.selection_bias[i] : 0);
        if (r.num_groups > 1) keep_best_groups(r, choice, parts + 2 * n, reinterpret_cast<int32_t*>(parts + 3 * n));
        find_highest(choice, n, r.top_k, experts);
        float total = 1e-20f;
        for (int i = 0; i < r.top_k; ++i) total += weights[i] = scores[experts[i]];
        if (r.normalizes)
            for (int i = 0; i < r.top_k; ++i) weights[i] /= total;
    }
    for (int i = 0; i < r.top_k; ++i) weights[i] *= r.scaling;
}

}  // namespace KV_VARIANT
