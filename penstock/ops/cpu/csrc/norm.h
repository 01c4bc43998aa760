// Sums along a row: value c always belongs to lane c mod 16.
#pragma once

#include "number.h"

namespace penstock {
namespace PENSTOCK_PATH {

// Folds groups of 16 values into 16 lanes; the last group is padded with `fill`.
template <class Step>
inline float sum_row(const float* x, int64_t width, float fill, const Step& step) {
    Vec sums[kParts] = {}, values[kParts];
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) {
        load_group(x + c, values);
        for (int i = 0; i < kParts; i++) sums[i] = step(sums[i], values[i]);
    }
    if (c < width) {
        float lanes[kLanes];
        for (int64_t i = 0; i < kLanes; i++) lanes[i] = c + i < width ? x[c + i] : fill;
        load_group(lanes, values);
        for (int i = 0; i < kParts; i++) sums[i] = step(sums[i], values[i]);
    }
    return sum_lanes(sums);
}

inline float sum(const float* x, int64_t width) {
    return sum_row(x, width, 0.0f, [](Vec total, Vec value) { return total + value; });
}

// Sums the squared distances from `center`.
inline float sum_of_squares(const float* x, int64_t width, float center) {
    const Vec middle = broadcast(center);
    return sum_row(x, width, center, [=](Vec total, Vec value) {
        const Vec distance = value - middle;
        return fma(distance, distance, total);
    });
}

// Sums value(x) over a piece: as many values as float32 sums well. Where pieces begin is part of an op's meaning:
// sampling walks one of them.
constexpr int64_t kPiece = 1024;
template <class Value>
inline float sum_piece(const float* x, int64_t count, const Value& value) {
    float lanes[kLanes] = {};
    int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes)
        for (int i = 0; i < kLanes; i++) lanes[i] = lanes[i] + value(x[c + i]);
    for (int i = 0; c + i < count; i++) lanes[i] = lanes[i] + value(x[c + i]);
    Vec group[kParts];
    load_group(lanes, group);
    return sum_lanes(group);
}

// x / sqrt(mean(x²) + eps) · weight
inline void rms_norm_row(const float* x, int64_t width, const float* weight, float eps, float* to) {
    const float factor = 1.0f / __builtin_sqrtf(sum_of_squares(x, width, 0.0f) / float(width) + eps);
    for (int64_t c = 0; c < width; c++) to[c] = x[c] * factor * weight[c];
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
