#include "attention/rope.h"

KERNEL(rope)(const float* x, int64_t x_stride, int64_t num_tokens, int64_t num_heads, int64_t head_size,
             const int64_t* positions, int64_t num_positions, const float* cosines, const float* sines, int64_t half,
             float* out) {
    using namespace penstock::PENSTOCK_PATH;
    for (int64_t t = 0; t < num_tokens; t++)
        if (positions[t] < 0 || positions[t] >= num_positions) return kBadIndex;
    parallel_for(num_tokens, num_heads * head_size, [&](int64_t t) {
        for (int64_t h = 0; h < num_heads; h++)
            rotate(x + t * x_stride + h * head_size, out + (t * num_heads + h) * head_size, head_size, half,
                   cosines + positions[t] * half, sines + positions[t] * half);
    });
    return kDone;
}

EXPORT(rope)
