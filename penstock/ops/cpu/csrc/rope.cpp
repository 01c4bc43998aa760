#include "number.h"

KERNEL(rope)(const float* x, int64_t x_stride, int64_t num_tokens, int64_t num_heads, int64_t head_size,
             const int64_t* positions, int64_t num_positions, const float* cosines, const float* sines, int64_t half,
             float* out) {
    using namespace penstock::PENSTOCK_PATH;
    for (int64_t t = 0; t < num_tokens; t++)
        if (positions[t] < 0 || positions[t] >= num_positions) return kBadIndex;
    parallel_for(num_tokens, num_heads * head_size, [&](int64_t t) {
        const float *cosine = cosines + positions[t] * half, *sine = sines + positions[t] * half;
        for (int64_t h = 0; h < num_heads; h++) {
            const float* from = x + t * x_stride + h * head_size;
            float* to = out + (t * num_heads + h) * head_size;
            for (int64_t i = 0; i < half; i++) {
                const float a = from[i], b = from[i + half];
                to[i] = a * cosine[i] - b * sine[i];
                to[i + half] = b * cosine[i] + a * sine[i];
            }
            for (int64_t i = 2 * half; i < head_size; i++) to[i] = from[i];
        }
    });
    return kDone;
}

PACKED(rope)
