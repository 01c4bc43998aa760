// Attention of one query to at most 64 neighbouring positions, merged into what earlier positions gave.
#pragma once

#include "elementary.h"

namespace penstock {
namespace PENSTOCK_PATH {

constexpr int64_t kChunk = 64;          // absolute positions per partial

struct Rule {                           // from product to score
    float scale, softcap;
};

// One head of one query token; `q` and `values` are `size` floats long, a multiple of 16 filled up with zeros.
struct Query {
    const float* q;
    float* values;                      // weighted sum of v, not yet divided by `sum`
    float* out;
    int64_t first, last;                // positions it sees
    float slope;
    float max, sum;
};

// Keys and values of the positions of one chunk, by position mod 64; padded like the queries.
struct Chunk {
    const float *k[kChunk], *v[kChunk];
};

inline float dot(const float* a, const float* b, int64_t size) {
    Vec sums[kParts] = {}, x[kParts], y[kParts];
    for (int64_t d = 0; d < size; d += kLanes) {
        load_group(a + d, x);
        load_group(b + d, y);
        for (int i = 0; i < kParts; i++) sums[i] = fused(x[i], y[i], sums[i]);
    }
    return sum_lanes(sums);
}

// values = values · keep + share · Σ weights[j] v[j], the sum in order of j, for G groups of 16 values from d on.
template <int G>
inline void gather(const Chunk& chunk, int64_t begin, int64_t end, int64_t d, const float* weights, float keep,
                   float share, float* values) {
    Vec sums[G][kParts] = {};
    for (int64_t j = begin; j < end; j++) {
        const Vec weight = broadcast(weights[j]);
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) {
            Vec v[kParts];
            load_group(chunk.v[j] + d + g * kLanes, v);
#pragma GCC unroll 8
            for (int i = 0; i < kParts; i++) sums[g][i] = fused(weight, v[i], sums[g][i]);
        }
    }
    for (int g = 0; g < G; g++) {
        for (int i = 0; i < kParts; i++) {
            float* to = values + d + g * kLanes + i * kWidth;
            store(to, fused(load(to), broadcast(keep), sums[g][i] * broadcast(share)));
        }
    }
}

// Positions [begin, end) of the chunk that starts at absolute position `base`; 0 ≤ begin < end ≤ 64.
inline void attend(Query& query, const Chunk& chunk, int64_t base, int64_t begin, int64_t end, int64_t size,
                   const Rule& rule) {
    constexpr int kTogether = 8 / kParts;
    float weights[kChunk];
    for (int64_t j = 0; j < kChunk; j++) weights[j] = -__builtin_inff();
    for (int64_t j = begin; j < end; j++) weights[j] = dot(query.q, chunk.k[j], size) * rule.scale;
    if (rule.softcap != 0.0f)
        for (int64_t j = begin; j < end; j++) weights[j] = rule.softcap * tangent(weights[j] / rule.softcap);
    if (query.slope != 0.0f)
        for (int64_t j = begin; j < end; j++) weights[j] = weights[j] + query.slope * float(base + j - query.last);
    float max = weights[begin];
    for (int64_t j = begin + 1; j < end; j++) max = weights[j] > max ? weights[j] : max;
    float lanes[kLanes] = {};
    for (int64_t j = 0; j < kChunk; j++) weights[j] = exponential(weights[j] - max);
    for (int64_t j = 0; j < kChunk; j += kLanes)
        for (int i = 0; i < kLanes; i++) lanes[i] = lanes[i] + weights[j + i];
    Vec group[kParts];
    load_group(lanes, group);

    const float top = query.max > max ? query.max : max;
    const float keep = exponential(query.max - top), share = exponential(max - top);
    query.max = top;
    query.sum = fused(query.sum, keep, sum_lanes(group) * share);
    int64_t d = 0;
    for (; d + kTogether * kLanes <= size; d += kTogether * kLanes)
        gather<kTogether>(chunk, begin, end, d, weights, keep, share, query.values);
    for (; d < size; d += kLanes) gather<1>(chunk, begin, end, d, weights, keep, share, query.values);
}

// Working memory of one item: queries with their padded rows, and room for the padded keys and values of a chunk.
struct Bench {
    Query* queries;
    float *rows, *k, *v;

    Bench(int64_t num_queries, int64_t size) {
        const int64_t head = ceil_div(num_queries * int64_t(sizeof(Query)), 64) * 64, floats = 2 * size * sizeof(float);
        char* memory = static_cast<char*>(scratch(head + (num_queries + kChunk) * floats));
        queries = reinterpret_cast<Query*>(memory);
        rows = reinterpret_cast<float*>(memory + head);
        k = rows + num_queries * 2 * size;
        v = k + kChunk * size;
    }

    void add(int64_t index, const float* q, float* out, int64_t head_size, int64_t size, int64_t first, int64_t last,
             float slope) {
        float *padded = rows + index * 2 * size, *values = padded + size;
        for (int64_t d = 0; d < size; d++) padded[d] = d < head_size ? q[d] : 0.0f;
        for (int64_t d = 0; d < size; d++) values[d] = 0.0f;
        queries[index] = {padded, values, out, first, last, slope, -__builtin_inff(), 0.0f};
    }
};

// All queries over all positions they see, chunk by chunk; fill(chunk, begin, end) provides absolute positions
// [begin, end) and says whether it could.
template <class Fill>
bool attend_all(Query* queries, int64_t count, int64_t head_size, int64_t size, const Rule& rule, const Fill& fill) {
    int64_t first = queries[0].first, last = queries[0].last;
    for (int64_t i = 1; i < count; i++) {
        first = smaller(first, queries[i].first);
        last = larger(last, queries[i].last);
    }
    Chunk chunk;
    for (int64_t base = first / kChunk * kChunk; base <= last; base += kChunk) {
        if (!fill(chunk, larger(first, base), smaller(last + 1, base + kChunk))) return false;
        for (int64_t i = 0; i < count; i++) {
            const int64_t begin = larger(queries[i].first, base), end = smaller(queries[i].last + 1, base + kChunk);
            if (begin < end) attend(queries[i], chunk, base, begin - base, end - base, size, rule);
        }
    }
    for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < head_size; d++) queries[i].out[d] = queries[i].values[d] / queries[i].sum;
    return true;
}

inline const float* padded_row(const float* from, float* room, int64_t head_size, int64_t size) {
    if (head_size == size) return from;
    for (int64_t d = 0; d < size; d++) room[d] = d < head_size ? from[d] : 0.0f;
    return room;
}

template <class T>
inline const float* padded_row(const T* from, float* room, int64_t head_size, int64_t size) {
    int64_t d = 0;
    for (; d + kLanes <= head_size; d += kLanes) {
        Vec group[kParts];
        load_group(from + d, group);
        std::memcpy(room + d, group, sizeof group);
    }
    for (; d < size; d++) room[d] = d < head_size ? widen(from[d]) : 0.0f;
    return room;
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
