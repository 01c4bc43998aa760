#include "simd.h"

KERNEL(add)(const float* x, int64_t x_stride, const float* y, int64_t y_stride, int64_t num_rows, int64_t width,
            float scale, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    parallel_for(num_rows, width, [&](int64_t row) {
        const float *a = x + row * x_stride, *b = y + row * y_stride;
        float* to = out + row * width;
        for (int64_t c = 0; c < width; c++) to[c] = a[c] + scale * b[c];
    });
    return kDone;
}

PACKED(add)
