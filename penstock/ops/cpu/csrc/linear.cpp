#include "dense.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

constexpr int64_t kBlockBytes = 512 * 1024;     // of x: a block stays in the L2 cache while panels stream by
constexpr int kTogether = kParts == 1 ? 2 : 1;  // panels per tile: enough accumulators to hide the latency of fma
constexpr int64_t kWideRows = 16;               // from this many rows on a widened copy of a panel pays

// Reads weights in place, or for many rows from a float32 copy in scratch memory.
template <int N, class T>
inline void multiply_rows(const Input& input, const Epilogue& epilogue, int64_t row, int64_t end, int64_t panel,
                          const T* const (&panels)[N]) {
    if constexpr (sizeof(T) == sizeof(float)) {
        multiply_dense(input, epilogue, row, end, panel, panels);
    } else if (end - row < kWideRows) {
        multiply_dense(input, epilogue, row, end, panel, panels);
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
        multiply_dense(input, epilogue, row, end, panel, widened);
    }
}

template <class T>
void multiply(const Input& input, const Epilogue& epilogue, const T* weights) {
    const int64_t size = input.width * kLanes, num_panels = epilogue.num_panels();
    const int64_t together = epilogue.gated ? 1 : kTogether, num_items = ceil_div(num_panels, together);
    const int64_t fitting = kBlockBytes / (max(input.width, 1) * int64_t(sizeof(float)));
    const int64_t block_rows = max(fitting / kAccumulators, 4) * kAccumulators;
    const int64_t num_blocks = ceil_div(input.num_rows, block_rows);
    const int64_t work = min(input.num_rows, block_rows) * size * together / 4;
    parallel_for(num_blocks * num_items, work, [&](int64_t item) {
        const int64_t row = item / num_items * block_rows, end = min(row + block_rows, input.num_rows);
        const int64_t panel = item % num_items * together;
        const T* const first = weights + panel * size;
        if (epilogue.gated) {
            const T* const both[2] = {first, first + num_panels * size};
            multiply_rows(input, epilogue, row, end, panel, both);
        } else if (panel + kTogether <= num_panels) {
            const T* several[kTogether];
            for (int n = 0; n < kTogether; n++) several[n] = first + n * size;
            multiply_rows(input, epilogue, row, end, panel, several);
        } else {
            const T* const one[1] = {first};
            multiply_rows(input, epilogue, row, end, panel, one);
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
    const Epilogue epilogue = {bias, residual, residual_stride, activation, gated, num_out, out, out_stride};
    return with_type(type, [&](auto* typed) {
        multiply(input, epilogue, static_cast<decltype(typed)>(const_cast<void*>(panels)));
        return kDone;
    });
}

EXPORT(linear)
