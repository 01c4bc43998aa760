#include "activations.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

constexpr int64_t kPiece = 1024;  // values per work item

template <class Kind>
void apply(const float* x, int64_t num_rows, int64_t width, bool gated, float* out) {
    const int64_t pieces = ceil_div(width, kPiece), x_stride = gated ? 2 * width : width;
    parallel_for(num_rows * pieces, 8 * smaller(width, kPiece), [&](int64_t item) {
        const int64_t row = item / pieces, begin = item % pieces * kPiece, end = smaller(begin + kPiece, width);
        const float *from = x + row * x_stride, *up = from + width;
        float* to = out + row * width;
        if (gated) {
            for (int64_t c = begin; c < end; c++) to[c] = Kind::of(from[c]) * up[c];
        } else {
            for (int64_t c = begin; c < end; c++) to[c] = Kind::of(from[c]);
        }
    });
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(activation)(const float* x, int64_t num_rows, int64_t width, int32_t kind, int32_t gated, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    return with_activation(kind, [&](auto activation) {
        apply<decltype(activation)>(x, num_rows, width, gated, out);
        return kDone;
    });
}

PACKED(activation)
