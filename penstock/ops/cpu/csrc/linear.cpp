#include "number.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

constexpr int kTileRows = 12 / kParts;          // 12 of 16 registers accumulate
constexpr int64_t kDirectRows = kWidth >= 8 ? INT64_MAX : kTileRows;  // more rows are worth a widened copy of a panel
constexpr int64_t kGroup = 4;                   // panels per work item
constexpr int64_t kAhead = 64;                  // inner positions, for the prefetch of weights
constexpr int64_t kBlockBytes = 512 * 1024;     // of x, to stay in the second-level cache while panels pass by

struct Call {
    const float* x;
    int64_t x_stride, num_rows, width, num_out;
    const float* bias;
    float* out;
};

// The first min(16, rest) outputs of a panel for one row.
inline void finish(const Call& call, int64_t row, int64_t panel, const Vec (&sums)[kParts]) {
    const int64_t begin = panel * kLanes, count = smaller(kLanes, call.num_out - begin);
    float* out = call.out + row * call.num_out + begin;
    float lanes[kLanes];
    std::memcpy(lanes, sums, sizeof lanes);
    if (call.bias != nullptr)
        for (int64_t i = 0; i < count; i++) lanes[i] = lanes[i] + call.bias[begin + i];
    if (count == kLanes) {
        std::memcpy(out, lanes, sizeof lanes);
    } else {
        for (int64_t i = 0; i < count; i++) out[i] = lanes[i];
    }
}

// R rows by N panels. Every output is one chain of fused products over the width, in order, whatever R and N are.
template <int R, int N, class T>
inline void tile(const Call& call, int64_t row, int64_t panel, const T* weights) {
    const float* x = call.x + row * call.x_stride;
    const int64_t panel_size = call.width * kLanes;
    Vec sums[R][N][kParts] = {};
    for (int64_t c = 0; c < call.width; c++) {
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) {
            Vec w[kParts];
            load_group(weights + n * panel_size + c * kLanes, w);
            __builtin_prefetch(weights + n * panel_size + (c + kAhead) * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const Vec value = broadcast(x[r * call.x_stride + c]);
#pragma GCC unroll 16
                for (int i = 0; i < kParts; i++) sums[r][n][i] = fused(value, w[i], sums[r][n][i]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) finish(call, row + r, panel + n, sums[r][n]);
}

// All panels of [panel, end) for R rows; with few rows several panels at once, to keep the memory busy.
template <int R, class T>
void strip(const Call& call, int64_t row, int64_t panel, int64_t end, const T* weights) {
    constexpr int kTogether = R * kParts >= 8 ? 1 : R * kParts >= 4 ? 2 : 4;
    const int64_t panel_size = call.width * kLanes;
    for (; panel + kTogether <= end; panel += kTogether, weights += kTogether * panel_size)
        tile<R, kTogether>(call, row, panel, weights);
    for (; panel < end; panel++, weights += panel_size) tile<R, 1>(call, row, panel, weights);
}

template <int R, class T>
void strip_of(int64_t count, const Call& call, int64_t row, int64_t panel, int64_t end, const T* weights) {
    if (count == R) return strip<R>(call, row, panel, end, weights);
    if constexpr (R > 1) strip_of<R - 1>(count, call, row, panel, end, weights);
}

// Rows [row, end_row) by panels [panel, end): each panel is taken against all the rows while it is in cache, the rows
// cut into tiles of nearly equal height.
template <class T>
void block(const Call& call, int64_t row, int64_t end_row, int64_t panel, int64_t end, const T* weights) {
    const int64_t tiles = ceil_div(end_row - row, kTileRows);
    const int64_t height = (end_row - row) / tiles, taller = (end_row - row) % tiles;
    if (tiles == 1) return strip_of<kTileRows>(height, call, row, panel, end, weights);
    for (; panel < end; panel++, weights += call.width * kLanes) {
        int64_t r = row;
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t count = height + (i < taller);
            strip_of<kTileRows>(count, call, r, panel, panel + 1, weights);
            r += count;
        }
    }
}

inline void widened(const Call& call, int64_t row, int64_t end_row, int64_t panel, int64_t end, const float* weights) {
    block(call, row, end_row, panel, end, weights);
}

template <class T>
void widened(const Call& call, int64_t row, int64_t end_row, int64_t panel, int64_t end, const T* weights) {
    if (end_row - row <= kDirectRows) return block(call, row, end_row, panel, end, weights);
    const int64_t size = (end - panel) * call.width * kLanes;
    float* wide = static_cast<float*>(scratch(size * sizeof(float)));
    for (int64_t i = 0; i < size; i += kLanes) {
        Vec group[kParts];
        load_group(weights + i, group);
        std::memcpy(wide + i, group, sizeof group);
    }
    block(call, row, end_row, panel, end, static_cast<const float*>(wide));
}

template <class T>
void multiply(const Call& call, const T* panels) {
    const int64_t num_panels = ceil_div(call.num_out, kLanes), num_groups = ceil_div(num_panels, kGroup);
    const int64_t fitting = kBlockBytes / (larger(call.width, 1) * int64_t(sizeof(float)));
    const int64_t block_rows = larger(fitting / kTileRows, 4) * kTileRows;
    const int64_t num_blocks = ceil_div(call.num_rows, block_rows);
    const int64_t work = smaller(call.num_rows, block_rows) * call.width * kLanes * kGroup / 4;
    parallel_for(num_blocks * num_groups, work, [&](int64_t item) {
        const int64_t row = item / num_groups * block_rows, panel = item % num_groups * kGroup;
        const int64_t end_row = smaller(row + block_rows, call.num_rows), end = smaller(panel + kGroup, num_panels);
        widened(call, row, end_row, panel, end, panels + panel * call.width * kLanes);
    });
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(linear)(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, const void* panels, int32_t type,
               int64_t num_out, const float* bias, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    const Call call = {x, x_stride, num_rows, width, num_out, bias, out};
    return with_type(type, [&](auto* typed) {
        multiply(call, static_cast<decltype(typed)>(const_cast<void*>(panels)));
        return kDone;
    });
}

PACKED(linear)
