#include <cstring>

#include "simd.h"

// Each work item makes all moves in order on its own columns, so items are independent.
KERNEL(block_move)(int32_t* blocks, int64_t num_blocks, int64_t width, const int64_t* moves, int64_t count) {
    using namespace penstock::PENSTOCK_PATH;
    constexpr int64_t kPiece = 4096;
    for (int64_t i = 0; i < count; i++)
        if (moves[2 * i] >= num_blocks || moves[2 * i + 1] < 0 || moves[2 * i + 1] >= num_blocks) return kBadIndex;
    parallel_for(ceil_div(width, kPiece), count * min(width, kPiece), [&](int64_t piece) {
        const int64_t begin = piece * kPiece, size = min(width - begin, kPiece);
        for (int64_t i = 0; i < count; i++)
            if (moves[2 * i] >= 0)
                std::memmove(blocks + moves[2 * i + 1] * width + begin, blocks + moves[2 * i] * width + begin,
                             size * 4);
    });
    return kDone;
}

EXPORT(block_move)
