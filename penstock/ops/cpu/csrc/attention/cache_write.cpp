#include "attention/cache.h"

// Strides count elements: from token to token in k and v, from block to block in the caches and their scales.
KERNEL(cache_write)(const float* k, int64_t k_stride, const float* v, int64_t v_stride, void* k_cache,
                    int64_t k_cache_stride, void* v_cache, int64_t v_cache_stride, float* k_scale,
                    int64_t k_scale_stride, float* v_scale, int64_t v_scale_stride, int32_t type, const int64_t* slots,
                    int64_t num_tokens, int64_t num_blocks, int64_t num_heads, int64_t block_size, int64_t head_size) {
    using namespace penstock::PENSTOCK_PATH;
    const PagedCache cache = {k_cache,        v_cache,        k_cache_stride, v_cache_stride, k_scale,    v_scale,
                              k_scale_stride, v_scale_stride, num_blocks,     num_heads,      block_size, head_size};
    for (int64_t t = 0; t < num_tokens; t++)
        if (!cache.has(slots[t])) return kBadIndex;
    return with_cache_type(type, [&](auto* typed) {
        using Stored = typename Pointee<decltype(typed)>::Type;
        parallel_for(num_tokens, 4 * num_heads * head_size, [&](int64_t t) {
            for (int64_t h = 0; h < num_heads; h++)
                write_head<Stored>(cache, slots[t], h, k + t * k_stride + h * head_size,
                                   v + t * v_stride + h * head_size);
        });
        return kDone;
    });
}

EXPORT(cache_write)
