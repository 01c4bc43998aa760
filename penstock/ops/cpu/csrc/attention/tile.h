// Register tiles of attention: a few query rows against 64 neighbouring positions of one key/value head.
//
// A score is one chain of fused products over the head's dimensions in order, a lane owning a position; a value is one
// chain over positions in order, a lane owning a dimension. No tile shape changes either chain.
#pragma once

#include "attention/cache.h"
#include "attention/softmax.h"

namespace penstock {
namespace PENSTOCK_PATH {

constexpr int64_t kGroups = kChunk / kLanes;  // groups of 16 positions in a chunk

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 24;  // of 32 registers
#else
constexpr int kSums = 12;  // of 16
#endif
constexpr int kTileRows = kSums / kParts < 6 ? kSums / kParts : 6;

constexpr int groups_beside(int rows) {  // groups of 16 lanes for which a tile of `rows` rows has registers
    return kSums / (rows * kParts) >= 4 ? 4 : kSums / (rows * kParts) >= 2 ? 2 : 1;
}

// 64 neighbouring positions. Position 16 g + i has its keys at k[g][d * k_stride + i]; 16 of its values, from dimension
// 16 n on, are at v[g][i * v_row + n * v_stride]. Groups that no row sees may point anywhere.
template <class T>
struct Chunk {
    const T *k[kGroups], *v[kGroups];
    const float *k_scale[kGroups], *v_scale[kGroups];  // of an int8 cache
    int64_t k_stride, v_row, v_stride;
    bool scaled;
    const Chunk* next;  // to be prefetched; may be this one
};

template <class T>
constexpr bool kFetch = sizeof(T) < 4;  // read in place, so worth a prefetch

// Products of R rows, packed as q[d][R], with G groups of positions from group `first` on → scores[R][64].
template <int R, int G, class T>
inline void compute_scores(const float* q, const Chunk<T>& chunk, int64_t first, int64_t head_size, float* scores) {
    Vec sums[R][G][kParts] = {};
    const T *k[G], *next[G];
    for (int g = 0; g < G; g++) k[g] = chunk.k[first + g], next[g] = chunk.next->k[first + g];
    for (int64_t d = 0; d < head_size; d++, q += R) {
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) {
            Vec keys[kParts];
            load_group(k[g], keys);
            if (kFetch<T>) __builtin_prefetch(next[g]), next[g] += chunk.k_stride;
            k[g] += chunk.k_stride;
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Vec x = broadcast(q[r]);
#pragma GCC unroll 8
                for (int i = 0; i < kParts; i++) sums[r][g][i] = fma(x, keys[i], sums[r][g][i]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int g = 0; g < G; g++)
#pragma GCC unroll 8
            for (int i = 0; i < kParts; i++)
                store(scores + r * kChunk + (first + g) * kLanes + i * kWidth, sums[r][g][i]);
}

// Computes all groups of [begin, end); scores outside of it are undefined.
template <int R, class T>
__attribute__((noinline)) void compute_score_rows(const float* q, const Chunk<T>& chunk, int64_t begin, int64_t end,
                                                  int64_t head_size, float* scores) {
    constexpr int kTogether = groups_beside(R);
    int64_t group = begin / kLanes;
    const int64_t last = ceil_div(end, kLanes);
    for (; group + kTogether <= last; group += kTogether)
        compute_scores<R, kTogether>(q, chunk, group, head_size, scores);
    for (; group < last; group++) compute_scores<R, 1>(q, chunk, group, head_size, scores);
}

// Where a tile of values goes: values[r] = values[r] · keep[r] + sums · share[r], or the sums alone.
struct Target {
    float* values;              // [rows][size]
    const float *keep, *share;  // null: the sums alone
    int64_t size;
};

// Positions that each row of a tile sees, and those that all of them see.
template <int R>
struct Visible {
    const int32_t *begin, *end;
    int64_t common, until;
    bool even;  // all rows see the same

    Visible(const int32_t* begin, const int32_t* end)
        : begin(begin), end(end), common(begin[0]), until(end[0]), even(true) {
        for (int r = 1; r < R; r++) {
            even = even && begin[r] == begin[0] && end[r] == end[0];
            common = max(common, begin[r]);
            until = min(until, end[r]);
        }
        until = max(common, until);
    }
};

// Σ weights[r][j] · v[j] over the positions that each row sees, for G groups of dimensions from d on.
template <int R, int G, bool kEven, class T>
inline void sum_values(const float* weights, const Chunk<T>& chunk, const Visible<R>& visible, int64_t d,
                       const Target& target) {
    Vec sums[R][G][kParts] = {};
    const int64_t shift = d / kLanes * chunk.v_stride, stride = chunk.v_stride;
    const auto alone = [&](int r, int64_t from, int64_t to) {
        for (int64_t j = from; j < to; j++) {
            const T* row = chunk.v[j / kLanes] + j % kLanes * chunk.v_row + shift;
            const Vec weight = broadcast(weights[r * kChunk + j]);
#pragma GCC unroll 8
            for (int g = 0; g < G; g++) {
                Vec v[kParts];
                load_group(row + g * stride, v);
#pragma GCC unroll 8
                for (int i = 0; i < kParts; i++) sums[r][g][i] = fma(weight, v[i], sums[r][g][i]);
            }
        }
    };
    if constexpr (!kEven)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) alone(r, visible.begin[r], min(visible.common, visible.end[r]));
    for (int64_t j = visible.common; j < visible.until;) {
        const int64_t group = j / kLanes, stop = min(visible.until, (group + 1) * kLanes);
        const int64_t start = j % kLanes * chunk.v_row + shift;
        const T *row = chunk.v[group] + start, *next = chunk.next->v[group] + start;
        for (; j < stop; j++, row += chunk.v_row) {
            if (kFetch<T>) __builtin_prefetch(next), next += chunk.v_row;
#pragma GCC unroll 8
            for (int g = 0; g < G; g++) {
                Vec v[kParts];
                load_group(row + g * stride, v);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const Vec weight = broadcast(weights[r * kChunk + j]);
#pragma GCC unroll 8
                    for (int i = 0; i < kParts; i++) sums[r][g][i] = fma(weight, v[i], sums[r][g][i]);
                }
            }
        }
    }
    if constexpr (!kEven)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) alone(r, visible.until, visible.end[r]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        if (!kEven && visible.begin[r] >= visible.end[r]) continue;
#pragma GCC unroll 8
        for (int g = 0; g < G; g++)
#pragma GCC unroll 8
            for (int i = 0; i < kParts; i++) {
                float* to = target.values + r * target.size + d + g * kLanes + i * kWidth;
                Vec sum = sums[r][g][i];
                if (target.keep != nullptr)
                    sum = fma(load(to), broadcast(target.keep[r]), sum * broadcast(target.share[r]));
                store(to, sum);
            }
    }
}

template <int R, bool kEven, class T>
__attribute__((noinline)) void sum_value_rows(const float* weights, const Chunk<T>& chunk, const Visible<R>& visible,
                                              const Target& target) {
    constexpr int kTogether = groups_beside(R);
    int64_t d = 0;
    for (; d + kTogether * kLanes <= target.size; d += kTogether * kLanes)
        sum_values<R, kTogether, kEven>(weights, chunk, visible, d, target);
    for (; d < target.size; d += kLanes) sum_values<R, 1, kEven>(weights, chunk, visible, d, target);
}

template <int R, class T>
inline void sum_value_rows(const float* weights, const Chunk<T>& chunk, const int32_t* begin, const int32_t* end,
                           const Target& target) {
    const Visible<R> visible(begin, end);
    if (!visible.even) return sum_value_rows<R, false>(weights, chunk, visible, target);
    if (begin[0] < end[0]) sum_value_rows<R, true>(weights, chunk, visible, target);
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
