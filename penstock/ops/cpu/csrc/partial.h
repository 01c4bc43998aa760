// Attention of some query rows, chunk of 64 positions by chunk: each gives a partial (max, sum, weighted values) of its
// own, and partials are merged in order of position.
#pragma once

#include "elementary.h"
#include "attention_tile.h"

namespace penstock {
namespace PENSTOCK_PATH {

struct Rule {                           // from product to score
    float scale, softcap;
};

typedef int32_t Integers __attribute__((vector_size(sizeof(Vec))));

#if defined(__AVX512F__)
inline Vec or_more(Vec least, Vec x) { return _mm512_max_ps(least, x); }         // where one is NaN, x
#elif defined(__AVX2__)
inline Vec or_more(Vec least, Vec x) { return _mm256_max_ps(least, x); }
#else
inline Vec or_more(Vec least, Vec x) { return least > x ? least : x; }
#endif

// 2^x for x ≤ 0, within 1.4 ulp and 1 at 0. What would be smaller than 2^-126 is that: too little to change a sum with a
// 1 in it. Coefficients: least largest relative error on [-1/2, 1/2].
inline Vec decay(Vec x) {
    x = or_more(broadcast(-126.0f), x);
    const Vec shifted = x + broadcast(0x1.8p+23f);       // the nearest integer in the low bits
    const Vec r = x - (shifted - broadcast(0x1.8p+23f));
    Vec p = broadcast(0x1.5bba14p-10f);
    p = fused(p, r, broadcast(0x1.3cea88p-7f));
    p = fused(p, r, broadcast(0x1.c6b752p-5f));
    p = fused(p, r, broadcast(0x1.ebf9bcp-3f));
    p = fused(p, r, broadcast(0x1.62e42ap-1f));
    p = fused(p, r, broadcast(1.0f));
    return Vec(Integers(p) + (Integers(shifted) << 23));
}

#if defined(__AVX2__)
struct Sum {
    __m256 operator()(__m256 a, __m256 b) const { return _mm256_add_ps(a, b); }
    __m128 operator()(__m128 a, __m128 b) const { return _mm_add_ps(a, b); }
};
struct Largest {
    __m256 operator()(__m256 a, __m256 b) const { return _mm256_max_ps(a, b); }
    __m128 operator()(__m128 a, __m128 b) const { return _mm_max_ps(a, b); }
};

// Halves of the 16 lanes together, then quarters, …
template <class Both>
inline float fold(const Vec (&group)[kParts], const Both& both) {
#if defined(__AVX512F__)
    const __m256 x = both(_mm512_castps512_ps256(group[0]), _mm512_extractf32x8_ps(group[0], 1));
#else
    const __m256 x = both(group[0], group[1]);
#endif
    __m128 y = both(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = both(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(both(y, _mm_movehdup_ps(y)));
}
#else
struct Sum {
    float operator()(float a, float b) const { return a + b; }
};
struct Largest {
    float operator()(float a, float b) const { return a > b ? a : b; }
};

template <class Both>
inline float fold(const Vec (&group)[kParts], const Both& both) {
    float lanes[kLanes];
    std::memcpy(lanes, group, sizeof lanes);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = both(lanes[i], lanes[i + width]);
    return lanes[0];
}
#endif

struct Weighing {                       // of one row over one chunk
    Rule rule;
    float slope;                        // ALiBi
    int32_t distance;                   // from the row's own position to the chunk's first
    int32_t begin, end;                 // positions it sees

    bool plain() const { return rule.softcap == 0.0f && slope == 0.0f && rule.scale > 0.0f; }
    // Times this, a score is a power of two instead of e.
    float factor() const { return plain() ? rule.scale * 0x1.715476p+0f : 0x1.715476p+0f; }
};

// Where products and scores differ by more than a factor.
inline void shape(float* row, const Weighing& how) {
    for (int j = 0; j < kChunk; j++) row[j] = row[j] * how.rule.scale;
    if (how.rule.softcap != 0.0f)
        for (int j = 0; j < kChunk; j++) row[j] = how.rule.softcap * tangent(row[j] / how.rule.softcap);
    if (how.slope != 0.0f)
        for (int j = 0; j < kChunk; j++) row[j] = row[j] + how.slope * float(how.distance + j);
}

constexpr int kChunkVecs = kChunk / kWidth;

// Makes one row's 64 products scores, up to a factor; gives the largest one times the factor.
inline float score(float* row, const Weighing& how) {
    if (!how.plain()) shape(row, how);
    if (how.begin > 0 || how.end < kChunk)
        for (int j = 0; j < kChunk; j++) row[j] = (j >= how.begin) & (j < how.end) ? row[j] : -__builtin_inff();
    Vec lanes[kParts];
    load_group(row, lanes);
    for (int i = kParts; i < kChunkVecs; i++) lanes[i % kParts] = or_more(load(row + i * kWidth), lanes[i % kParts]);
    return fold(lanes, Largest{}) * how.factor();
}

// Scores become weights 2^(score · factor - max); gives their sum.
inline float weigh(float* row, float factor, float max) {
    Vec x[kChunkVecs], lanes[kParts];
    for (int i = 0; i < kChunkVecs; i++) {
        x[i] = decay(fused(load(row + i * kWidth), broadcast(factor), broadcast(-max)));
        store(row + i * kWidth, x[i]);
    }
    for (int i = 0; i < kParts; i++) lanes[i] = x[i];
    for (int i = kParts; i < kChunkVecs; i++) lanes[i % kParts] = lanes[i % kParts] + x[i];
    return fold(lanes, Sum{});
}

// Where the partials of a chunk go that are merged later: [count] each, and values [count][size].
struct Partials {
    float *max, *sum, *values;          // the first two filled up like those of Rows
};

// Query rows that share the keys and values of one head; a row is one query head of one token.
struct Rows {
    int64_t count, head_size, size;     // size: head_size filled up to a multiple of 16
    float *q;                           // packed [tile][D][rows of the tile]
    float *weights;                     // [count][64]
    float *values;                      // [count][size], not yet divided by the sum
    float *max, *sum, *part_max, *part_sum, *keep, *share, *slope;
    int32_t *first, *last;              // absolute positions a row sees
    int32_t *begin, *end;               // the same within the present chunk

    static constexpr int64_t kArrays = 11;

    static int64_t bytes(int64_t count, int64_t head_size, int64_t size) {
        return int64_t(sizeof(float)) * (count * (kChunk + size) + padded(count * head_size) + kArrays * padded(count));
    }

    static int64_t padded(int64_t count) { return ceil_div(count, kLanes) * kLanes; }

    Rows(int64_t count, int64_t head_size, int64_t size, char* memory)
        : count(count), head_size(head_size), size(size) {
        float* next = reinterpret_cast<float*>(memory);
        const auto take = [&](int64_t floats) { return (next += floats) - floats; };
        weights = take(count * kChunk);
        values = take(count * size);
        q = take(padded(count * head_size));
        float** const floats[] = {&max, &sum, &part_max, &part_sum, &keep, &share, &slope};
        for (float** array : floats) *array = take(padded(count));
        int32_t** const integers[] = {&first, &last, &begin, &end};
        for (int32_t** array : integers) *array = reinterpret_cast<int32_t*>(take(padded(count)));
    }

    int64_t num_tiles() const { return ceil_div(count, kTileRows); }
    int64_t tile(int64_t index) const { return count * index / num_tiles(); }    // its first row

    // Takes over query vectors: row(i) points to row i's.
    template <class Row>
    void pack(const Row& row) {
        for (int64_t t = 0; t < num_tiles(); t++) {
            const int64_t from = tile(t);
            with_rows(tile(t + 1) - from, [&](auto num) {
                constexpr int kNum = decltype(num)::value;
                const float* x[kNum];
                for (int r = 0; r < kNum; r++) x[r] = row(from + r);
                float* to = q + from * head_size;
                for (int64_t d = 0; d < head_size; d++, to += kNum)
                    for (int r = 0; r < kNum; r++) to[r] = x[r][d];
            });
        }
        for (int64_t i = 0; i < padded(count); i++) {
            max[i] = -__builtin_inff(), sum[i] = 0.0f;
            begin[i] = end[i] = 0;
        }
        for (int64_t i = 0; i < count * size; i++) values[i] = 0.0f;
    }

    // What each row sees of the chunk at `base`.
    void look(int64_t base) {
        const int32_t start = int32_t(base);
        for (int64_t i = 0; i < count; i++) {
            const int32_t from = first[i] - start, to = last[i] + 1 - start;
            begin[i] = from > 0 ? from : 0;
            end[i] = to < kChunk ? to : int32_t(kChunk);
        }
    }

    bool sees(int64_t row) const { return begin[row] < end[row]; }

    // How each row's partial enters what came before it.
    void join(const Partials& parts) {
        for (int64_t i = 0; i < count; i += kWidth) {
            const Vec old = load(max + i), part = load(parts.max + i), before = load(sum + i);
            const Vec top = or_more(old, part), kept = decay(old - top), added = decay(part - top);
            const Vec joined = fused(before, kept, load(parts.sum + i) * added);
            Integers from, to;
            std::memcpy(&from, begin + i, sizeof from);
            std::memcpy(&to, end + i, sizeof to);
            store(keep + i, kept);
            store(share + i, added);
            store(sum + i, from < to ? joined : before);
            store(max + i, from < to ? top : old);
        }
    }
};

// Times the scale of each position, in the groups of [begin, end).
inline void scale_groups(float* row, const float* const* scales, int64_t begin, int64_t end) {
    for (int64_t g = begin / kLanes; g < ceil_div(end, kLanes); g++)
        for (int j = 0; j < kLanes; j++) row[g * kLanes + j] = row[g * kLanes + j] * scales[g][j];
}

// Weights of the rows [from, to), which are one tile, and their partials' max and sum.
template <class T>
inline void weigh_tile(Rows& rows, int64_t from, int64_t to, const Chunk<T>& chunk, int64_t base, const Rule& rule,
                       const Partials& parts) {
    int64_t begin = kChunk, end = 0;
    for (int64_t i = from; i < to; i++) {
        if (!rows.sees(i)) continue;
        begin = smaller(begin, rows.begin[i]);
        end = larger(end, rows.end[i]);
    }
    if (begin >= end) return;
    with_rows(to - from, [&](auto num) {
        score_rows<decltype(num)::value>(rows.q + from * rows.head_size, chunk, begin, end, rows.head_size,
                                         rows.weights + from * kChunk);
    });
    const auto how = [&](int64_t i) {
        return Weighing{rule, rows.slope[i], int32_t(base) - rows.last[i], rows.begin[i], rows.end[i]};
    };
    for (int64_t i = from; i < to; i++) {
        float* row = rows.weights + i * kChunk;
        if (chunk.scaled) scale_groups(row, chunk.k_scale, begin, end);
        parts.max[i] = score(row, how(i));
    }
    for (int64_t i = from; i < to; i++) {
        float* row = rows.weights + i * kChunk;
        parts.sum[i] = weigh(row, how(i).factor(), parts.max[i]);
        if (chunk.scaled) scale_groups(row, chunk.v_scale, begin, end);
    }
}

// The chunk at `base`, merged into the rows or, with `later`, put there.
template <class T>
inline void attend_chunk(Rows& rows, const Chunk<T>& chunk, int64_t base, const Rule& rule, const Partials* later) {
    const Partials parts = later ? *later : Partials{rows.part_max, rows.part_sum, rows.values};
    for (int64_t t = 0; t < rows.num_tiles(); t++)
        weigh_tile(rows, rows.tile(t), rows.tile(t + 1), chunk, base, rule, parts);
    if (!later) rows.join(parts);
    for (int64_t t = 0; t < rows.num_tiles(); t++) {
        const int64_t from = rows.tile(t);
        const Target target = {parts.values + from * rows.size, later ? nullptr : rows.keep + from, rows.share + from,
                               rows.size};
        with_rows(rows.tile(t + 1) - from, [&](auto num) {
            value_rows<decltype(num)::value>(rows.weights + from * kChunk, chunk, rows.begin + from, rows.end + from,
                                             target);
        });
    }
}

// What attend_chunk() would have done at once with partials it put aside.
inline void merge(Rows& rows, const Partials& part) {
    rows.join(part);
    for (int64_t i = 0; i < rows.count; i++) {
        if (!rows.sees(i)) continue;
        const Vec keep = broadcast(rows.keep[i]), share = broadcast(rows.share[i]);
        for (int64_t d = i * rows.size; d < (i + 1) * rows.size; d += kWidth)
            store(rows.values + d, fused(load(rows.values + d), keep, load(part.values + d) * share));
    }
}

inline void finish_row(const Rows& rows, int64_t row, float* out) {
    for (int64_t d = 0; d < rows.head_size; d++) out[d] = rows.values[row * rows.size + d] / rows.sum[row];
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
