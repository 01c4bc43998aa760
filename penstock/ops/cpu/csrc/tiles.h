// Tiles of rows of a matrix product. The tiling never changes a result: every output is one chain of sums.
#pragma once

#include "epilogue.h"

namespace penstock {
namespace PENSTOCK_PATH {

// Rows cut into tiles of nearly equal height, at most `max_height`.
struct Heights {
    int64_t num_tiles, height, num_taller;

    Heights(int64_t num_rows, int64_t max_height)
        : num_tiles(ceil_div(num_rows, max_height)), height(num_tiles ? num_rows / num_tiles : 0),
          num_taller(num_tiles ? num_rows % num_tiles : 0) {}

    int64_t rows(int64_t tile) const { return height + (tile < num_taller); }
    int64_t tile(int64_t row) const {
        const int64_t taller = num_taller * (height + 1);
        return row < taller ? row / (height + 1) : num_taller + (row - taller) / height;
    }
    int64_t first(int64_t tile) const { return tile * height + min(tile, num_taller); }
};

}  // namespace PENSTOCK_PATH
}  // namespace penstock
