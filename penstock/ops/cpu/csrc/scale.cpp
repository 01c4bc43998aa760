#include "simd.h"

KERNEL(scale)(const float* x, int64_t size, float factor, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    constexpr int64_t kPiece = 4096;
    parallel_for(ceil_div(size, kPiece), smaller(size, kPiece), [&](int64_t item) {
        const int64_t begin = item * kPiece, end = smaller(begin + kPiece, size);
        for (int64_t i = begin; i < end; i++) out[i] = x[i] * factor;
    });
    return kDone;
}

PACKED(scale)
