#include "attention/cache.h"

// Each head makes all moves in order, so heads are independent. Strides count elements from block to block.
KERNEL(cache_move)(void* k_cache, int64_t k_cache_stride, void* v_cache, int64_t v_cache_stride, float* k_scale,
                   int64_t k_scale_stride, float* v_scale, int64_t v_scale_stride, int32_t type, const int64_t* moves,
                   int64_t num_moves, int64_t num_blocks, int64_t num_heads, int64_t block_size, int64_t head_size) {
    using namespace penstock::PENSTOCK_PATH;
    const PagedCache cache = {k_cache,        v_cache,        k_cache_stride, v_cache_stride, k_scale,    v_scale,
                              k_scale_stride, v_scale_stride, num_blocks,     num_heads,      block_size, head_size};
    for (int64_t i = 0; i < 2 * num_moves; i++)
        if (!cache.has(moves[i])) return kBadIndex;
    return with_cache_type(type, [&](auto* typed) {
        using Stored = typename Pointee<decltype(typed)>::Type;
        parallel_for(num_heads, 4 * num_moves * head_size, [&](int64_t h) {
            for (int64_t i = 0; i < num_moves; i++) move_head<Stored>(cache, moves[2 * i], moves[2 * i + 1], h);
        });
        return kDone;
    });
}

EXPORT(cache_move)
