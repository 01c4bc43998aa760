// From the products of a query with 64 positions to their weights.
#pragma once

#include "elementary.h"

namespace penstock {
namespace PENSTOCK_PATH {

constexpr int64_t kChunk = 64;  // absolute positions per partial

struct Rule {  // from product to score
    float scale, softcap;
};

typedef int32_t Integers __attribute__((vector_size(sizeof(Vec))));

#if defined(__AVX512F__)
inline Vec or_more(Vec least, Vec x) { return _mm512_max_ps(least, x); }  // where one is NaN, x
#elif defined(__AVX2__)
inline Vec or_more(Vec least, Vec x) { return _mm256_max_ps(least, x); }
#else
inline Vec or_more(Vec least, Vec x) { return least > x ? least : x; }
#endif

// 2^x for x ≤ 0, within 1.4 ulp, and 1 at 0. What would be smaller than 2^-126 is that: too little to change a sum that
// has a 1 in it. Coefficients: least largest relative error on [-1/2, 1/2].
inline Vec decay(Vec x) {
    x = or_more(broadcast(-126.0f), x);
    const Vec shifted = x + broadcast(0x1.8p+23f);  // the nearest integer in the low bits
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

struct Weighing {  // of one row over one chunk
    Rule rule;
    float slope;         // ALiBi
    int32_t distance;    // from the row's own position to the chunk's first
    int32_t begin, end;  // positions it sees

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

}  // namespace PENSTOCK_PATH
}  // namespace penstock
