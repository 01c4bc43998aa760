#include "elementary.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

struct Silu { static float of(float x) { return x * logistic(x); } };
struct Gelu { static float of(float x) { return x * normal_share(x); } };
// x/2 · (1 + tanh u) = x · logistic(2u), u = sqrt(2/π) · (x + 0.044715 x³)
struct GeluTanh { static float of(float x) { return x * logistic(1.5957691216f * fused(0.044715f * x * x, x, x)); } };
struct Relu { static float of(float x) { return x > 0.0f || x != x ? x : 0.0f; } };
struct Relu2 { static float of(float x) { return Relu::of(x) * Relu::of(x); } };
struct QuickGelu { static float of(float x) { return x * logistic(1.702f * x); } };

constexpr int64_t kPiece = 1024;        // values per work item

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

// `kind` is the position in KINDS of activation.py.
KERNEL(activation)(const float* x, int64_t num_rows, int64_t width, int32_t kind, int32_t gated, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    switch (kind) {
        case 0: apply<Silu>(x, num_rows, width, gated, out); break;
        case 1: apply<Gelu>(x, num_rows, width, gated, out); break;
        case 2: apply<GeluTanh>(x, num_rows, width, gated, out); break;
        case 3: apply<Relu>(x, num_rows, width, gated, out); break;
        case 4: apply<Relu2>(x, num_rows, width, gated, out); break;
        case 5: apply<QuickGelu>(x, num_rows, width, gated, out); break;
        default: return kBadIndex;
    }
    return kDone;
}

PACKED(activation)
