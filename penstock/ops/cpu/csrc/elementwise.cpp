// Ops that compute or copy element by element.
#include "activations.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

constexpr int64_t kPiece = 1024;      // values of one row per work item
constexpr int64_t kFlatPiece = 4096;  // values of a whole tensor per work item

template <class Kind>
void activate(const float* x, int64_t num_rows, int64_t width, bool gated, float* out) {
    const int64_t pieces = ceil_div(width, kPiece), x_stride = gated ? 2 * width : width;
    parallel_for(num_rows * pieces, 8 * min(width, kPiece), [&](int64_t item) {
        const int64_t row = item / pieces, begin = item % pieces * kPiece, end = min(begin + kPiece, width);
        const float *from = x + row * x_stride, *up = from + width;
        float* to = out + row * width;
        if (gated) {
            for (int64_t c = begin; c < end; c++) to[c] = Kind::of(from[c]) * Kind::up(up[c]);
        } else {
            for (int64_t c = begin; c < end; c++) to[c] = Kind::of(from[c]);
        }
    });
}

// out[i] = function(x[i]); `work` is what one element costs, in elements copied.
template <class Function>
void map(const float* x, int64_t size, int64_t work, float* out, const Function& function) {
    parallel_for(ceil_div(size, kFlatPiece), work * min(size, kFlatPiece), [&](int64_t item) {
        const int64_t begin = item * kFlatPiece, end = min(begin + kFlatPiece, size);
        for (int64_t i = begin; i < end; i++) out[i] = function(x[i]);
    });
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(activation)(const float* x, int64_t num_rows, int64_t width, int32_t kind, int32_t gated, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    return with_activation(kind, [&](auto activation) {
        activate<decltype(activation)>(x, num_rows, width, gated, out);
        return kDone;
    });
}

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

KERNEL(scale)(const float* x, int64_t size, float factor, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    map(x, size, 1, out, [=](float value) { return value * factor; });
    return kDone;
}

KERNEL(softcap)(const float* x, int64_t size, float cap, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    map(x, size, 8, out, [=](float value) { return cap * hyperbolic_tangent(value / cap); });
    return kDone;
}

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

KERNEL(take_columns)(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, const int64_t* order,
                     int64_t count, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    for (int64_t c = 0; c < count; c++)
        if (order[c] < 0 || order[c] >= width) return kBadIndex;
    parallel_for(num_rows, count, [&](int64_t row) {
        const float* from = x + row * x_stride;
        for (int64_t c = 0; c < count; c++) out[row * count + c] = from[order[c]];
    });
    return kDone;
}

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

template <class Id>
void count_from(const Id* ids, int64_t size, int64_t first, int64_t count, bool clamps, Id* out) {
    for (int64_t i = 0; i < size; i++) {
        const int64_t local = int64_t(ids[i]) - first;
        out[i] = Id(local >= 0 && local < count ? local : clamps ? 0 : -1);
    }
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

// Ids of [first, first + count) counted from first; others become -1, or 0. They are 64 bits wide, or 32.
KERNEL(local_ids)(const void* ids, int32_t is_wide, int64_t size, int64_t first, int64_t count, int32_t clamps,
                  void* out) {
    using namespace penstock::PENSTOCK_PATH;
    if (is_wide) {
        count_from(static_cast<const int64_t*>(ids), size, first, count, clamps, static_cast<int64_t*>(out));
    } else {
        count_from(static_cast<const int32_t*>(ids), size, first, count, clamps, static_cast<int32_t*>(out));
    }
    return kDone;
}

// Rows of negative ids become -0, which added to anything leaves its bits.
KERNEL(blank_rows)(const float* x, int64_t x_stride, const void* ids, int32_t is_wide, int64_t num_rows, int64_t width,
                   float* out) {
    using namespace penstock::PENSTOCK_PATH;
    parallel_for(num_rows, width, [&](int64_t row) {
        const float* from = x + row * x_stride;
        float* to = out + row * width;
        const int64_t id = is_wide ? static_cast<const int64_t*>(ids)[row] : static_cast<const int32_t*>(ids)[row];
        for (int64_t c = 0; c < width; c++) to[c] = id < 0 ? -0.0f : from[c];
    });
    return kDone;
}

EXPORT(activation)
EXPORT(add)
EXPORT(scale)
EXPORT(softcap)
EXPORT(gather)
EXPORT(take_columns)
EXPORT(local_ids)
EXPORT(blank_rows)
