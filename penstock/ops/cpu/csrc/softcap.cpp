#include "elementary.h"

KERNEL(softcap)(const float* x, int64_t size, float cap, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    constexpr int64_t kPiece = 4096;
    parallel_for(ceil_div(size, kPiece), 8 * smaller(size, kPiece), [&](int64_t item) {
        const int64_t begin = item * kPiece, end = smaller(begin + kPiece, size);
        for (int64_t i = begin; i < end; i++) out[i] = cap * tangent(x[i] / cap);
    });
    return kDone;
}

PACKED(softcap)
