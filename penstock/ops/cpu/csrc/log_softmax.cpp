#include <cmath>

#include "elementary.h"
#include "norm.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

float find_largest(const float* x, int64_t width) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; i++) lanes[i] = x[0];
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes)
        for (int i = 0; i < kLanes; i++) lanes[i] = x[c + i] > lanes[i] ? x[c + i] : lanes[i];
    for (; c < width; c++) lanes[0] = x[c] > lanes[0] ? x[c] : lanes[0];
    for (int i = 1; i < kLanes; i++) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    return lanes[0];
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(log_softmax)(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    if (width == 0) return kDone;
    parallel_for(num_rows, 8 * width, [&](int64_t row) {
        const float* from = x + row * x_stride;
        const float shift = find_largest(from, width);
        double sum = 0.0;  // of the pieces
        for (int64_t c = 0; c < width; c += kPiece)
            sum += double(
                sum_piece(from + c, min(kPiece, width - c), [=](float value) { return exponential(value - shift); }));
        const float log_sum = float(::log(sum));
        for (int64_t c = 0; c < width; c++) out[row * width + c] = (from[c] - shift) - log_sum;
    });
    return kDone;
}

EXPORT(log_softmax)
