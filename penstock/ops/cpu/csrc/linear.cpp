#include "dense.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

constexpr int64_t kBlockBytes = 512 * 1024;     // of x, to stay in the second-level cache while panels pass by
constexpr int kTogether = kParts == 1 ? 2 : 1;  // panels per tile: enough chains of sums to hide a product's latency
constexpr int64_t kWideRows = 16;               // from so many rows on a widened copy of a panel pays

// Weights as the tiles read them: in place, or a float32 copy in working memory.
template <int N, class T>
inline void rows_of(const Input& input, const Finish& finish, int64_t row, int64_t end, int64_t panel,
                    const T* const (&panels)[N]) {
    if constexpr (sizeof(T) == sizeof(float)) {
        dense_rows(input, finish, row, end, panel, panels);
    } else if (end - row < kWideRows) {
        dense_rows(input, finish, row, end, panel, panels);
    } else {
        const int64_t size = input.width * kLanes;
        float* wide = static_cast<float*>(scratch(N * size * sizeof(float)));
        const float* widened[N];
        for (int n = 0; n < N; n++) {
            widened[n] = wide + n * size;
            for (int64_t i = 0; i < size; i += kLanes) {
                Vec group[kParts];
                load_group(panels[n] + i, group);
                std::memcpy(wide + n * size + i, group, sizeof group);
            }
        }
        dense_rows(input, finish, row, end, panel, widened);
    }
}

template <class T>
void multiply(const Input& input, const Finish& finish, const T* weights) {
    const int64_t size = input.width * kLanes, num_panels = finish.num_panels();
    const int64_t together = finish.gated ? 1 : kTogether, num_items = ceil_div(num_panels, together);
    const int64_t fitting = kBlockBytes / (larger(input.width, 1) * int64_t(sizeof(float)));
    const int64_t block_rows = larger(fitting / kAccumulators, 4) * kAccumulators;
    const int64_t num_blocks = ceil_div(input.num_rows, block_rows);
    const int64_t work = smaller(input.num_rows, block_rows) * size * together / 4;
    parallel_for(num_blocks * num_items, work, [&](int64_t item) {
        const int64_t row = item / num_items * block_rows, end = smaller(row + block_rows, input.num_rows);
        const int64_t panel = item % num_items * together;
        const T* const first = weights + panel * size;
        if (finish.gated) {
            const T* const both[2] = {first, first + num_panels * size};
            rows_of(input, finish, row, end, panel, both);
        } else if (panel + kTogether <= num_panels) {
            const T* several[kTogether];
            for (int n = 0; n < kTogether; n++) several[n] = first + n * size;
            rows_of(input, finish, row, end, panel, several);
        } else {
            const T* const one[1] = {first};
            rows_of(input, finish, row, end, panel, one);
        }
    });
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(linear)(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, const void* panels, int32_t type,
               int64_t num_out, const float* bias, const float* residual, int64_t residual_stride, int32_t activation,
               int32_t gated, float* out, int64_t out_stride) {
    using namespace penstock::PENSTOCK_PATH;
    const Input input = {x, x_stride, num_rows, width};
    const Finish finish = {bias, residual, residual_stride, activation, gated, num_out, out, out_stride};
    return with_type(type, [&](auto* typed) {
        multiply(input, finish, static_cast<decltype(typed)>(const_cast<void*>(panels)));
        return kDone;
    });
}

PACKED(linear)
