// Rotary position embedding of one head.
#pragma once

#include "number.h"

namespace penstock {
namespace PENSTOCK_PATH {

// Rotates the pairs (i, i + half) by the angles whose cosines and sines are given, and copies the rest.
inline void rotate(const float* __restrict from, float* __restrict to, int64_t head_size, int64_t half,
                   const float* __restrict cosine, const float* __restrict sine) {
    for (int64_t i = 0; i < half; i++) {
        const float a = from[i], b = from[i + half];
        to[i] = a * cosine[i] - b * sine[i];
        to[i + half] = b * cosine[i] + a * sine[i];
    }
    for (int64_t i = 2 * half; i < head_size; i++) to[i] = from[i];
}

// The same for the pairs (2 i, 2 i + 1).
inline void rotate_neighbours(const float* __restrict from, float* __restrict to, int64_t head_size, int64_t half,
                              const float* __restrict cosine, const float* __restrict sine) {
    for (int64_t i = 0; i < half; i++) {
        const float a = from[2 * i], b = from[2 * i + 1];
        to[2 * i] = a * cosine[i] - b * sine[i];
        to[2 * i + 1] = b * cosine[i] + a * sine[i];
    }
    for (int64_t i = 2 * half; i < head_size; i++) to[i] = from[i];
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
