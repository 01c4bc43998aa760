#include "simd.h"

KERNEL(gather)(const int64_t* at, int64_t count, const float* x, int64_t x_stride, int64_t num_rows, int64_t width,
               float* out) {
    using namespace penstock::PENSTOCK_PATH;
    for (int64_t i = 0; i < count; i++)
        if (at[i] < 0 || at[i] >= num_rows) return kBadIndex;
    parallel_for(count, width, [&](int64_t i) {
        const float* from = x + at[i] * x_stride;
        for (int64_t c = 0; c < width; c++) out[i * width + c] = from[c];
    });
    return kDone;
}

PACKED(gather)
