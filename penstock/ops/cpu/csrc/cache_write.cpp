#include "number.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

struct Place {
    int64_t num_heads, head_size, block_size;
};

template <class T>
void write(const float* from, T* cache, int64_t cache_stride, int64_t slot, const Place& place) {
    T* block = cache + slot / place.block_size * cache_stride + slot % place.block_size * place.head_size;
    for (int64_t h = 0; h < place.num_heads; h++) {
        T* to = block + h * place.block_size * place.head_size;
        for (int64_t d = 0; d < place.head_size; d++) narrow(from[h * place.head_size + d], to[d]);
    }
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

// Strides count elements: from token to token in k and v, from block to block in the caches.
KERNEL(cache_write)(const float* k, int64_t k_stride, const float* v, int64_t v_stride, void* k_cache,
                    int64_t k_cache_stride, void* v_cache, int64_t v_cache_stride, int32_t type, const int64_t* slots,
                    int64_t num_tokens, int64_t num_blocks, int64_t num_heads, int64_t block_size, int64_t head_size) {
    using namespace penstock::PENSTOCK_PATH;
    const Place place = {num_heads, head_size, block_size};
    for (int64_t t = 0; t < num_tokens; t++)
        if (slots[t] < 0 || slots[t] >= num_blocks * block_size) return kBadIndex;
    return with_type(type, [&](auto* typed) {
        parallel_for(num_tokens, 2 * num_heads * head_size, [&](int64_t t) {
            write(k + t * k_stride, static_cast<decltype(typed)>(k_cache), k_cache_stride, slots[t], place);
            write(v + t * v_stride, static_cast<decltype(typed)>(v_cache), v_cache_stride, slots[t], place);
        });
        return kDone;
    });
}

PACKED(cache_write)
