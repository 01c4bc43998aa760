// Attention of query rows over KV splits of 64 positions (chunks). Each chunk gives a partial result (max, sum,
// weighted values); partials are merged in order of position.
#pragma once

#include "attention/softmax.h"
#include "attention/tile.h"

namespace penstock {
namespace PENSTOCK_PATH {

// One chunk's partials, to be merged later: max and sum [count], values [count][size].
struct Partials {
    float *max, *sum, *values;  // max and sum padded like those of Rows
};

// Query rows that share the keys and values of one head; a row is one query head of one token.
struct Rows {
    int64_t count, head_size, size;  // size: head_size padded to a multiple of 16
    float* q;                        // packed [tile][D][rows of the tile]
    float* weights;                  // [count][64]
    float* values;                   // [count][size], not yet divided by the sum
    float *max, *sum, *part_max, *part_sum, *keep, *share, *slope;
    int32_t *first, *last;  // absolute positions a row sees
    int32_t *begin, *end;   // the same within the current chunk

    static constexpr int64_t kArrays = 11;

    static int64_t bytes(int64_t count, int64_t head_size, int64_t size) {
        return int64_t(sizeof(float)) * (count * (kChunk + size) + pad(count * head_size) + kArrays * pad(count));
    }

    static int64_t pad(int64_t count) { return ceil_div(count, kLanes) * kLanes; }

    Rows(int64_t count, int64_t head_size, int64_t size, char* memory)
        : count(count), head_size(head_size), size(size) {
        float* next = reinterpret_cast<float*>(memory);
        const auto take = [&](int64_t floats) { return (next += floats) - floats; };
        weights = take(count * kChunk);
        values = take(count * size);
        q = take(pad(count * head_size));
        float** const floats[] = {&max, &sum, &part_max, &part_sum, &keep, &share, &slope};
        for (float** array : floats) *array = take(pad(count));
        int32_t** const integers[] = {&first, &last, &begin, &end};
        for (int32_t** array : integers) *array = reinterpret_cast<int32_t*>(take(pad(count)));
    }

    int64_t num_tiles() const { return ceil_div(count, kTileRows); }
    int64_t tile(int64_t index) const { return count * index / num_tiles(); }  // its first row

    // Packs the query vectors; row(i) points to that of row i.
    template <class Row>
    void pack(const Row& row) {
        for (int64_t t = 0; t < num_tiles(); t++) {
            const int64_t from = tile(t);
            with_count<kTileRows>(tile(t + 1) - from, [&](auto num) {
                constexpr int kNum = decltype(num)::value;
                const float* x[kNum];
                for (int r = 0; r < kNum; r++) x[r] = row(from + r);
                float* to = q + from * head_size;
                for (int64_t d = 0; d < head_size; d++, to += kNum)
                    for (int r = 0; r < kNum; r++) to[r] = x[r][d];
            });
        }
        for (int64_t i = 0; i < pad(count); i++) {
            max[i] = -__builtin_inff(), sum[i] = 0.0f;
            begin[i] = end[i] = 0;
        }
        for (int64_t i = 0; i < count * size; i++) values[i] = 0.0f;
    }

    // Sets the positions that each row sees in the chunk at `base`.
    void set_visible(int64_t base) {
        const int32_t start = int32_t(base);
        for (int64_t i = 0; i < count; i++) {
            const int32_t from = first[i] - start, to = last[i] + 1 - start;
            begin[i] = from > 0 ? from : 0;
            end[i] = to < kChunk ? to : int32_t(kChunk);
        }
    }

    bool can_see(int64_t row) const { return begin[row] < end[row]; }

    // Updates the running max and sum with a chunk, and sets the factors that its values are merged with.
    void update_max_and_sum(const Partials& parts) {
        for (int64_t i = 0; i < count; i += kWidth) {
            const Vec old = load(max + i), part = load(parts.max + i), before = load(sum + i);
            const Vec top = max_lanes(old, part);
            const Vec kept = exp2_nonpositive(old - top), added = exp2_nonpositive(part - top);
            const Vec joined = fma(before, kept, load(parts.sum + i) * added);
            IntVec from, to;
            std::memcpy(&from, begin + i, sizeof from);
            std::memcpy(&to, end + i, sizeof to);
            store(keep + i, kept);
            store(share + i, added);
            store(sum + i, from < to ? joined : before);
            store(max + i, from < to ? top : old);
        }
    }
};

// Multiplies by each position's scale, in the groups of [begin, end).
inline void scale_groups(float* row, const float* const* scales, int64_t begin, int64_t end) {
    for (int64_t g = begin / kLanes; g < ceil_div(end, kLanes); g++)
        for (int j = 0; j < kLanes; j++) row[g * kLanes + j] = row[g * kLanes + j] * scales[g][j];
}

// Computes the weights of the rows [from, to) of one tile, and their partials' max and sum.
template <class T>
inline void softmax_tile(Rows& rows, int64_t from, int64_t to, const Chunk<T>& chunk, int64_t base, const Rule& rule,
                         const Partials& parts) {
    int64_t begin = kChunk, end = 0;
    for (int64_t i = from; i < to; i++) {
        if (!rows.can_see(i)) continue;
        begin = min(begin, rows.begin[i]);
        end = max(end, rows.end[i]);
    }
    if (begin >= end) return;
    with_count<kTileRows>(to - from, [&](auto num) {
        compute_score_rows<decltype(num)::value>(rows.q + from * rows.head_size, chunk, begin, end, rows.head_size,
                                                 rows.weights + from * kChunk);
    });
    const auto how = [&](int64_t i) {
        return ScoreRow{rule, rows.slope[i], int32_t(base) - rows.last[i], rows.begin[i], rows.end[i]};
    };
    for (int64_t i = from; i < to; i++) {
        float* row = rows.weights + i * kChunk;
        if (chunk.scaled) scale_groups(row, chunk.k_scale, begin, end);
        parts.max[i] = score(row, how(i));
    }
    for (int64_t i = from; i < to; i++) {
        float* row = rows.weights + i * kChunk;
        parts.sum[i] = exponentiate(row, how(i).factor(), parts.max[i]);
        if (chunk.scaled) scale_groups(row, chunk.v_scale, begin, end);
    }
}

// Attends to the chunk at `base`; the partials are merged into the rows or, with `later`, stored there.
template <class T>
inline void attend_chunk(Rows& rows, const Chunk<T>& chunk, int64_t base, const Rule& rule, const Partials* later) {
    const Partials parts = later ? *later : Partials{rows.part_max, rows.part_sum, rows.values};
    for (int64_t t = 0; t < rows.num_tiles(); t++)
        softmax_tile(rows, rows.tile(t), rows.tile(t + 1), chunk, base, rule, parts);
    if (!later) rows.update_max_and_sum(parts);
    for (int64_t t = 0; t < rows.num_tiles(); t++) {
        const int64_t from = rows.tile(t);
        const Target target = {parts.values + from * rows.size, later ? nullptr : rows.keep + from, rows.share + from,
                               rows.size};
        with_count<kTileRows>(rows.tile(t + 1) - from, [&](auto num) {
            sum_value_rows<decltype(num)::value>(rows.weights + from * kChunk, chunk, rows.begin + from,
                                                 rows.end + from, target);
        });
    }
}

// Merges partials that attend_chunk() stored.
inline void merge(Rows& rows, const Partials& part) {
    rows.update_max_and_sum(part);
    for (int64_t i = 0; i < rows.count; i++) {
        if (!rows.can_see(i)) continue;
        const Vec keep = broadcast(rows.keep[i]), share = broadcast(rows.share[i]);
        for (int64_t d = i * rows.size; d < (i + 1) * rows.size; d += kWidth)
            store(rows.values + d, fma(load(rows.values + d), keep, load(part.values + d) * share));
    }
}

// Divides by the sum of weights. A sink is one more score, without a value.
inline void write_output(const Rows& rows, int64_t row, const float* sink, float* out) {
    float total = rows.sum[row];
    if (sink != nullptr) total = total + exponential(*sink - rows.max[row] * 0x1.62e43p-1f);  // max is of powers of 2
    for (int64_t d = 0; d < rows.head_size; d++) out[d] = rows.values[row * rows.size + d] / total;
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
