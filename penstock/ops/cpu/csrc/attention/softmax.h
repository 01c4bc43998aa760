// The softmax of one chunk: from the products of a query with 64 positions to their weights.
#pragma once

#include "elementary.h"

namespace penstock {
namespace PENSTOCK_PATH {

constexpr int64_t kChunk = 64;  // absolute positions per KV split

struct Rule {  // from product to score
    float scale, softcap;
};

#if defined(__AVX512F__)
inline Vec max_lanes(Vec least, Vec x) { return _mm512_max_ps(least, x); }  // where one is NaN, x
#elif defined(__AVX2__)
inline Vec max_lanes(Vec least, Vec x) { return _mm256_max_ps(least, x); }
#else
inline Vec max_lanes(Vec least, Vec x) { return least > x ? least : x; }
#endif

// 2^x for x ≤ 0, within 1.4 ulp, and exactly 1 at 0. Results are clamped to 2^-126, too little to change a sum with a 1
// in it. Coefficients: minimax relative error on [-1/2, 1/2].
inline Vec exp2_nonpositive(Vec x) {
    x = max_lanes(broadcast(-126.0f), x);
    const Vec shifted = x + broadcast(0x1.8p+23f);  // the nearest integer in the low bits
    const Vec r = x - (shifted - broadcast(0x1.8p+23f));
    Vec p = broadcast(0x1.5bba14p-10f);
    p = fma(p, r, broadcast(0x1.3cea88p-7f));
    p = fma(p, r, broadcast(0x1.c6b752p-5f));
    p = fma(p, r, broadcast(0x1.ebf9bcp-3f));
    p = fma(p, r, broadcast(0x1.62e42ap-1f));
    p = fma(p, r, broadcast(1.0f));
    return Vec(IntVec(p) + (IntVec(shifted) << 23));
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

struct ScoreRow {  // one row over one chunk
    Rule rule;
    float slope;         // ALiBi
    int32_t distance;    // from the row's own position to the chunk's first
    int32_t begin, end;  // positions it sees

    bool is_plain() const { return rule.softcap == 0.0f && slope == 0.0f && rule.scale > 0.0f; }
    // Multiplied by this, a score is an exponent of 2 instead of e.
    float factor() const { return is_plain() ? rule.scale * 0x1.715476p+0f : 0x1.715476p+0f; }
};

// Turns products into scores where they differ by more than a factor.
inline void shape(float* row, const ScoreRow& how) {
    for (int j = 0; j < kChunk; j++) row[j] = row[j] * how.rule.scale;
    if (how.rule.softcap != 0.0f)
        for (int j = 0; j < kChunk; j++) row[j] = how.rule.softcap * hyperbolic_tangent(row[j] / how.rule.softcap);
    if (how.slope != 0.0f)
        for (int j = 0; j < kChunk; j++) row[j] = row[j] + how.slope * float(how.distance + j);
}

constexpr int kChunkVecs = kChunk / kWidth;

// Turns one row's 64 products into scores, up to a factor; returns the largest one times the factor.
inline float score(float* row, const ScoreRow& how) {
    if (!how.is_plain()) shape(row, how);
    if (how.begin > 0 || how.end < kChunk)
        for (int j = 0; j < kChunk; j++) row[j] = (j >= how.begin) & (j < how.end) ? row[j] : -__builtin_inff();
    Vec lanes[kParts];
    load_group(row, lanes);
    for (int i = kParts; i < kChunkVecs; i++) lanes[i % kParts] = max_lanes(load(row + i * kWidth), lanes[i % kParts]);
    return fold(lanes, Largest{}) * how.factor();
}

// Turns scores into weights 2^(score · factor - max); returns their sum.
inline float exponentiate(float* row, float factor, float max) {
    Vec x[kChunkVecs], lanes[kParts];
    for (int i = 0; i < kChunkVecs; i++) {
        x[i] = exp2_nonpositive(fma(load(row + i * kWidth), broadcast(factor), broadcast(-max)));
        store(row + i * kWidth, x[i]);
    }
    for (int i = 0; i < kParts; i++) lanes[i] = x[i];
    for (int i = kParts; i < kChunkVecs; i++) lanes[i % kParts] = lanes[i % kParts] + x[i];
    return fold(lanes, Sum{});
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
