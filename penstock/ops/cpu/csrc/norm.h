// Sums along a row: value c always belongs to lane c mod 16.
#pragma once

#include "number.h"

namespace penstock {
namespace PENSTOCK_PATH {

// Folds groups of 16 values into 16 lanes; the last group is filled up with `fill`.
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

// Of the distances from `center`.
inline float sum_of_squares(const float* x, int64_t width, float center) {
    const Vec middle = broadcast(center);
    return sum_row(x, width, center, [=](Vec total, Vec value) {
        const Vec distance = value - middle;
        return fused(distance, distance, total);
    });
}

// x / sqrt(mean(x²) + eps) · weight
inline void rms_norm_row(const float* x, int64_t width, const float* weight, float eps, float* to) {
    const float factor = 1.0f / __builtin_sqrtf(sum_of_squares(x, width, 0.0f) / float(width) + eps);
    for (int64_t c = 0; c < width; c++) to[c] = x[c] * factor * weight[c];
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
