// Attention of 16 query rows over latents: one vector per position, the key of every head, which begins with its value.
//
// A register's lanes are query rows, and the cache's numbers are broadcast to them, so keys and values are read as they
// are stored. A score is one chain of fused products over the key in order, a value one chain over the positions of a
// chunk of 64; partial results of chunks are merged in order of position. No lane depends on its neighbours.
#pragma once

#include "attention/paged.h"

namespace penstock {
namespace PENSTOCK_PATH {

constexpr int kBeside = kSums / kParts < 8 ? kSums / kParts : 8;  // positions, or numbers of a value, in one tile

// Scores of P positions, their keys at k[p * width] → [P][16].
template <int P>
inline void score_latents(const float* q, const float* k, int64_t width, float scale, float* scores) {
    Vec sums[P][kParts] = {};
    for (int64_t d = 0; d < width; d++, q += kLanes) {
        Vec x[kParts];
#pragma GCC unroll 8
        for (int i = 0; i < kParts; i++) x[i] = load(q + i * kWidth);
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            const Vec key = broadcast(k[p * width + d]);
#pragma GCC unroll 8
            for (int i = 0; i < kParts; i++) sums[p][i] = fma(key, x[i], sums[p][i]);
        }
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
#pragma GCC unroll 8
        for (int i = 0; i < kParts; i++) store(scores + p * kLanes + i * kWidth, sums[p][i] * broadcast(scale));
}

inline IntVec load_integers(const int32_t* from) {
    IntVec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

struct LatentRows {  // 16 query rows
    float* q;        // [width][16]
    float* values;   // [rank][16], not yet divided by the sum
    float *max, *sum, *keep, *share;
    int32_t *last, *end;  // the last position a row sees, and how many of the current chunk
    int64_t rank, width;

    static constexpr int64_t kArrays = 6;

    static int64_t floats(int64_t rank, int64_t width) { return (width + rank + kArrays) * kLanes; }
    static int64_t part_floats(int64_t rank) { return (rank + 2) * kLanes; }  // max, sum and values of a chunk

    LatentRows(float* memory, int64_t rank, int64_t width) : rank(rank), width(width) {
        const auto take = [&](int64_t count) { return (memory += count * kLanes) - count * kLanes; };
        q = take(width), values = take(rank);
        max = take(1), sum = take(1), keep = take(1), share = take(1);
        last = reinterpret_cast<int32_t*>(take(1)), end = reinterpret_cast<int32_t*>(take(1));
    }

    void clear(int64_t rank) {
        for (int64_t i = 0; i < kLanes; i++) max[i] = -__builtin_inff(), sum[i] = 0.0f;
        for (int64_t i = 0; i < rank * kLanes; i++) values[i] = 0.0f;
    }

    void set_visible(int64_t base) {
        for (int64_t i = 0; i < kLanes; i++) {
            const int64_t seen = last[i] + 1 - base;
            end[i] = int32_t(seen < 0 ? 0 : seen < kChunk ? seen : kChunk);
        }
    }

    // Turns scores[count][16] into weights; gives their largest score and their sum.
    void weigh(float* scores, int64_t count, float* part_max, float* part_sum) const {
        for (int i = 0; i < kParts; i++) {
            const IntVec seen = load_integers(end + i * kWidth);
            float* const column = scores + i * kWidth;
            Vec top = broadcast(-__builtin_inff()), total = {};
            for (int64_t j = 0; j < count; j++) {
                const Vec x = load(column + j * kLanes);
                top = seen > IntVec{} + int32_t(j) ? max_lanes(x, top) : top;
            }
            for (int64_t j = 0; j < count; j++) {
                const Vec weight = exp2_nonpositive(load(column + j * kLanes) - top);
                store(column + j * kLanes, weight);
                total = seen > IntVec{} + int32_t(j) ? total + weight : total;
            }
            store(part_max + i * kWidth, top);
            store(part_sum + i * kWidth, total);
        }
    }

    // Takes a chunk's largest score and sum into the running ones, and sets the factors that its values are merged
    // with.
    void update(const float* part_max, const float* part_sum) {
        for (int64_t i = 0; i < kLanes; i += kWidth) {
            const Vec old = load(max + i), part = load(part_max + i), before = load(sum + i);
            const Vec top = max_lanes(old, part);
            const Vec kept = exp2_nonpositive(old - top), added = exp2_nonpositive(part - top);
            const Vec joined = fma(before, kept, load(part_sum + i) * added);
            const IntVec seen = load_integers(end + i);
            store(keep + i, kept);
            store(share + i, added);
            store(sum + i, seen > IntVec{} ? joined : before);
            store(max + i, seen > IntVec{} ? top : old);
        }
    }

    Vec join(Vec before, Vec part, int i) const {
        const Vec joined = fma(before, load(keep + i * kWidth), part * load(share + i * kWidth));
        return load_integers(end + i * kWidth) > IntVec{} ? joined : before;
    }

    // Σ weights[j] · v[j] of N numbers of the value from d on, over the positions each row sees: all of them see the
    // first `common`. The sums go to `to`, or are merged into the values.
    template <int N>
    void sum_values(const float* weights, const float* v, int64_t common, int64_t count, int64_t d, float* to) {
        Vec sums[N][kParts] = {};
        int64_t j = 0;
        for (; j < common; j++) {
            Vec x[kParts];
#pragma GCC unroll 8
            for (int i = 0; i < kParts; i++) x[i] = load(weights + j * kLanes + i * kWidth);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                const Vec value = broadcast(v[j * width + d + n]);
#pragma GCC unroll 8
                for (int i = 0; i < kParts; i++) sums[n][i] = fma(value, x[i], sums[n][i]);
            }
        }
        for (; j < count; j++)
            for (int i = 0; i < kParts; i++) {
                const Vec x = load(weights + j * kLanes + i * kWidth);
                const IntVec seen = load_integers(end + i * kWidth) > IntVec{} + int32_t(j);
                for (int n = 0; n < N; n++)
                    sums[n][i] = seen ? fma(broadcast(v[j * width + d + n]), x, sums[n][i]) : sums[n][i];
            }
        for (int n = 0; n < N; n++)
            for (int i = 0; i < kParts; i++) {
                float* const at = values + (d + n) * kLanes + i * kWidth;
                if (to != nullptr) store(to + (d + n) * kLanes + i * kWidth, sums[n][i]);
                else store(at, join(load(at), sums[n][i], i));
            }
    }

    // Attends to `count` widened latents from position `base` on; the partial is merged or, with `part`, stored there.
    void attend(const float* latents, int64_t base, int64_t count, float scale, float* weights, float* part) {
        set_visible(base);
        int64_t common = count, most = 0;
        for (int64_t i = 0; i < kLanes; i++) common = min(common, end[i]), most = PENSTOCK_PATH::max(most, end[i]);
        count = min(count, most);
        if (count == 0) return;
        const float factor = scale * 0x1.715476p+0f;  // scores are exponents of 2
        for (int64_t j = 0; j < count; j += kBeside)
            with_count<kBeside>(min(kBeside, count - j), [&](auto num) {
                score_latents<decltype(num)::value>(q, latents + j * width, width, factor, weights + j * kLanes);
            });
        float own[2 * kLanes];
        float* const numbers = part != nullptr ? part : own;  // max and sum, in a stored partial before the values
        weigh(weights, count, numbers, numbers + kLanes);
        if (part == nullptr) update(numbers, numbers + kLanes);
        float* const to = part != nullptr ? part + 2 * kLanes : nullptr;
        for (int64_t d = 0; d < rank; d += kBeside)
            with_count<kBeside>(min(kBeside, rank - d), [&](auto num) {
                sum_values<decltype(num)::value>(weights, latents, common, count, d, to);
            });
    }

    // Merges a partial that attend() stored for the chunk at `base`.
    void merge(const float* part, int64_t base) {
        set_visible(base);
        bool any = false;
        for (int64_t i = 0; i < kLanes; i++) any = any || end[i] > 0;
        if (!any) return;
        update(part, part + kLanes);
        for (int64_t d = 0; d < rank; d++)
            for (int i = 0; i < kParts; i++) {
                float* const at = values + d * kLanes + i * kWidth;
                store(at, join(load(at), load(part + 2 * kLanes + d * kLanes + i * kWidth), i));
            }
    }

    // Writes the first `count` rows to out[count][rank].
    void write(int64_t count, float* out) const {
        for (int64_t i = 0; i < count; i++)
            for (int64_t d = 0; d < rank; d++) out[i * rank + d] = values[d * kLanes + i] / sum[i];
    }
};

}  // namespace PENSTOCK_PATH
}  // namespace penstock
