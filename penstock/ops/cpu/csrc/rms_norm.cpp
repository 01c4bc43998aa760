#include "norm.h"

KERNEL(rms_norm)(const float* x, int64_t num_outer, int64_t outer_stride, int64_t num_inner, int64_t inner_stride,
                 int64_t width, const float* weight, float eps, const float* residual, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    parallel_for(num_outer * num_inner, width, [&](int64_t row) {
        const float* from = x + row / num_inner * outer_stride + row % num_inner * inner_stride;
        float* to = out + row * width;
        rms_norm_row(from, width, weight, eps, to);
        if (residual != nullptr)
            for (int64_t c = 0; c < width; c++) to[c] = residual[row * width + c] + to[c];
    });
    return kDone;
}

PACKED(rms_norm)
