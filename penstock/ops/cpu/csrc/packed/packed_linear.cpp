#include "norm.h"
#include "packed/multiply.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

template <class Kind>
void multiply_rounded(const Call& call) {
    const Input& input = call.input;
    const bool few = input.num_rows <= kMaxInPlace<Kind>;
    const int64_t ones = few ? Direct<Kind, 1>::kOnes : 0;
    const Heights heights(input.num_rows, few ? kMaxInPlace<Kind> : kMaxHeight<Kind>);
    const RoundedRows<Kind> rows(input.num_rows + ones, call.planes.num_groups);
    parallel_for(input.num_rows, input.width * 2, [&](int64_t row) {
        const int64_t tile = heights.tile(row), first = heights.first(tile);
        const float* x = input.x + row * input.stride;
        if (call.norm != nullptr) {
            float* normed = static_cast<float*>(scratch(input.width * sizeof(float)));
            rms_norm_row(x, input.width, call.norm, call.eps, normed);
            x = normed;
        }
        round_row(x, input.width, Place<Kind>{rows, first, heights.rows(tile) + ones, row - first});
    });
    if (!few) {
        const Blocks<Kind> blocks(input.num_rows, rows.num_groups);
        const int64_t work = heights.height * blocks.tiles * rows.num_groups * kGroup * kLanes / 8;
        return parallel_for(blocks.num_items(call), work, [&](int64_t item) { blocks.multiply(call, rows, item); });
    }
    if (ones) put_ones(Place<Kind>{rows, 0, input.num_rows + ones, input.num_rows});
    const int64_t work = rows.num_groups * kGroup * kLanes * (call.epilogue.gated ? 1 : kTogether) / 2;
    parallel_for(num_few_items<Kind>(call), work, [&](int64_t item) { multiply_few(call, rows, item); });
}

template <class F>
void multiply_float(const Call& call) {
    const int64_t work = call.planes.num_groups * kGroup * kLanes * 4;
    parallel_for(call.epilogue.num_panels(), work, [&](int64_t panel) { multiply_widened<F>(call, panel); });
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(packed_linear)(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, int32_t format,
                      const uint8_t* codes, const uint8_t* high, const uint8_t* scales, const uint8_t* supers,
                      int32_t x_bits, const float* norm, float eps, int64_t num_out, const float* bias,
                      const float* residual, int64_t residual_stride, int32_t activation, int32_t gated, float* out,
                      int64_t out_stride) {
    using namespace penstock::PENSTOCK_PATH;
    const Call call = {{x, x_stride, num_rows, width},
                       norm,
                       eps,
                       {bias, residual, residual_stride, activation, gated, num_out, out, out_stride},
                       {codes, high, scales, supers, ceil_div(width, kGroup)}};
    if (num_rows == 0) return kDone;
    return with_format(format, [&](auto kind) {
        using F = decltype(kind);
        if (x_bits == 0 && norm == nullptr) multiply_float<F>(call);
        else if (x_bits == 8) multiply_rounded<Kind<F, 8>>(call);
        else if (x_bits == 16 && !gated) multiply_rounded<Kind<F, 16>>(call);
        else return kBadIndex;
        return kDone;
    });
}

EXPORT(packed_linear)
