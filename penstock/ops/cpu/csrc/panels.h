// Products of rows and panels of 16 or 32 bits, cut into items.
#pragma once

#include "dense.h"

namespace penstock {
namespace PENSTOCK_PATH {

constexpr int64_t kXBlockBytes = 512 * 1024;         // of x: a block stays in the L2 cache while panels stream by
constexpr int kDenseTogether = kParts == 1 ? 2 : 1;  // panels per tile: enough accumulators to hide the latency of fma
constexpr int64_t kWidenedRows = 16;                 // from this many rows on a widened copy of a panel pays

// Reads weights in place, or for many rows from a float32 copy in scratch memory.
template <int N, class T>
inline void multiply_rows(const Input& input, const Epilogue& epilogue, int64_t row, int64_t end, int64_t panel,
                          const T* const (&panels)[N]) {
    if constexpr (sizeof(T) == sizeof(float)) {
        multiply_dense(input, epilogue, row, end, panel, panels);
    } else if (end - row < kWidenedRows) {
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

// The items of a product: a block of rows by one panel or a few.
struct PanelItems {
    int64_t num_items, block_rows, num_blocks;

    PanelItems(int64_t num_rows, int64_t width, const Epilogue& epilogue) {
        num_items = ceil_div(epilogue.num_panels(), epilogue.gated ? 1 : kDenseTogether);
        const int64_t fitting = kXBlockBytes / (max(width, 1) * int64_t(sizeof(float)));
        block_rows = max(fitting / kAccumulators, 4) * kAccumulators;
        num_blocks = ceil_div(num_rows, block_rows);
    }

    int64_t count() const { return num_blocks * num_items; }

    template <class T>
    void multiply(const Input& input, const Epilogue& epilogue, const T* weights, int64_t item) const {
        const int64_t size = input.width * kLanes, num_panels = epilogue.num_panels();
        const int64_t row = item / num_items * block_rows, end = min(row + block_rows, input.num_rows);
        const int64_t panel = item % num_items * (epilogue.gated ? 1 : kDenseTogether);
        const T* const first = weights + panel * size;
        if (epilogue.gated) {
            const T* const both[2] = {first, first + num_panels * size};
            multiply_rows(input, epilogue, row, end, panel, both);
        } else if (panel + kDenseTogether <= num_panels) {
            const T* several[kDenseTogether];
            for (int n = 0; n < kDenseTogether; n++) several[n] = first + n * size;
            multiply_rows(input, epilogue, row, end, panel, several);
        } else {
            const T* const one[1] = {first};
            multiply_rows(input, epilogue, row, end, panel, one);
        }
    }
};

}  // namespace PENSTOCK_PATH
}  // namespace penstock
