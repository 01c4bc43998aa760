// Cutting a product into tiles of rows and panels. The cut never changes a result: every output is one chain of sums.
#pragma once

#include "finish.h"

namespace penstock {
namespace PENSTOCK_PATH {

// Rows cut into tiles of nearly equal height, at most `most`.
struct Heights {
    int64_t num_tiles, height, num_taller;

    Heights(int64_t num_rows, int64_t most)
        : num_tiles(ceil_div(num_rows, most)), height(num_tiles ? num_rows / num_tiles : 0),
          num_taller(num_tiles ? num_rows % num_tiles : 0) {}

    int64_t rows(int64_t tile) const { return height + (tile < num_taller); }
    int64_t tile(int64_t row) const {
        const int64_t taller = num_taller * (height + 1);
        return row < taller ? row / (height + 1) : num_taller + (row - taller) / height;
    }
    int64_t first(int64_t tile) const { return tile * height + smaller(tile, num_taller); }
};

template <int Value>
struct Constant {
    static constexpr int value = Value;
};

// Calls body with the count, 1 to Most, as a constant.
template <int Most, class Body>
inline void with_count(int64_t count, const Body& body) {
    if (count == Most) return body(Constant<Most>());
    if constexpr (Most > 1) with_count<Most - 1>(count, body);
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
