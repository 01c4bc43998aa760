#include "attention/rope.h"

// Strides count elements: from token to token and from head to head.
KERNEL(rope)(const float* x, int64_t x_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads,
             int64_t head_size, const int64_t* positions, int64_t num_positions, const float* cosines,
             const float* sines, int64_t half, int32_t interleaved, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    for (int64_t t = 0; t < num_tokens; t++)
        if (positions[t] < 0 || positions[t] >= num_positions) return kBadIndex;
    parallel_for(num_tokens, num_heads * head_size, [&](int64_t t) {
        const float *cosine = cosines + positions[t] * half, *sine = sines + positions[t] * half;
        for (int64_t h = 0; h < num_heads; h++) {
            const float* from = x + t * x_stride + h * head_stride;
            float* to = out + (t * num_heads + h) * head_size;
            if (interleaved) rotate_neighbours(from, to, head_size, half, cosine, sine);
            else rotate(from, to, head_size, half, cosine, sine);
        }
    });
    return kDone;
}

EXPORT(rope)
