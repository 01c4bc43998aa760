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

KERNEL(layer_norm)(const float* x, int64_t num_outer, int64_t outer_stride, int64_t num_inner, int64_t inner_stride,
                   int64_t width, const float* weight, const float* bias, float eps, const float* residual,
                   float* out) {
    using namespace penstock::PENSTOCK_PATH;
    parallel_for(num_outer * num_inner, 2 * width, [&](int64_t row) {
        const float* from = x + row / num_inner * outer_stride + row % num_inner * inner_stride;
        float* to = out + row * width;
        const float mean = sum(from, width) / float(width);
        const float factor = 1.0f / __builtin_sqrtf(sum_of_squares(from, width, mean) / float(width) + eps);
        for (int64_t c = 0; c < width; c++) to[c] = (from[c] - mean) * factor * weight[c];
        if (bias != nullptr)
            for (int64_t c = 0; c < width; c++) to[c] = to[c] + bias[c];
        if (residual != nullptr)
            for (int64_t c = 0; c < width; c++) to[c] = residual[row * width + c] + to[c];
    });
    return kDone;
}

EXPORT(rms_norm)
EXPORT(layer_norm)
