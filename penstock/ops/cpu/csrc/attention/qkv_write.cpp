#include "attention/cache.h"
#include "attention/rope.h"
#include "norm.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

struct HeadTransform {             // norm and rotation of one head of a token
    const float *q_norm, *k_norm;  // null: no norm
    float eps;
    const float *cosines, *sines;  // null: no rotation
    int64_t half, head_size;

    // Returns `from` itself if there is nothing to do, else `to`; `room` holds a row in between.
    const float* apply(const float* from, const float* weight, int64_t position, float* room, float* to) const {
        if (weight != nullptr) {
            float* normed = cosines != nullptr ? room : to;
            rms_norm_row(from, head_size, weight, eps, normed);
            from = normed;
        }
        if (cosines == nullptr) return from;
        rotate(from, to, head_size, half, cosines + position * half, sines + position * half);
        return to;
    }
};

template <class T>
void write_token(const HeadTransform& transform, const PagedCache& cache, const float* qkv, int64_t num_heads,
                 int64_t slot, int64_t position, float* out) {
    const int64_t size = cache.head_size;
    prefetch_keys<T>(cache, slot);
    float *room = static_cast<float*>(scratch(2 * size * sizeof(float))), *transformed = room + size;
    for (int64_t h = 0; h < num_heads; h++) {
        const float* q = transform.apply(qkv + h * size, transform.q_norm, position, room, out + h * size);
        if (q != out + h * size) std::memcpy(out + h * size, q, size * sizeof(float));
    }
    const float *keys = qkv + num_heads * size, *values = keys + cache.num_heads * size;
    for (int64_t h = 0; h < cache.num_heads; h++) {
        const float* k = transform.apply(keys + h * size, transform.k_norm, position, room, transformed);
        write_head<T>(cache, slot, h, k, values + h * size);
    }
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

// Strides count elements: from token to token in qkv, from block to block in the caches and their scales.
KERNEL(qkv_write)(const float* qkv, int64_t qkv_stride, void* k_cache, int64_t k_stride, void* v_cache,
                  int64_t v_stride, float* k_scale, int64_t k_scale_stride, float* v_scale, int64_t v_scale_stride,
                  int32_t type, const int64_t* slots, const int64_t* positions, const float* q_norm,
                  const float* k_norm, float eps, const float* cosines, const float* sines, int64_t num_positions,
                  int64_t half, int64_t num_tokens, int64_t num_blocks, int64_t num_heads, int64_t num_kv_heads,
                  int64_t block_size, int64_t head_size, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    const PagedCache cache = {k_cache,        v_cache,        k_stride,   v_stride,     k_scale,    v_scale,
                              k_scale_stride, v_scale_stride, num_blocks, num_kv_heads, block_size, head_size};
    const HeadTransform transform = {q_norm, k_norm, eps, cosines, sines, half, head_size};
    for (int64_t t = 0; t < num_tokens; t++) {
        if (!cache.has(slots[t])) return kBadIndex;
        if (cosines != nullptr && (positions[t] < 0 || positions[t] >= num_positions)) return kBadIndex;
    }
    return with_cache_type(type, [&](auto* typed) {
        using Stored = typename Pointee<decltype(typed)>::Type;
        parallel_for(num_tokens, 2 * (num_heads + 3 * num_kv_heads) * head_size, [&](int64_t t) {
            write_token<Stored>(transform, cache, qkv + t * qkv_stride, num_heads, slots[t], positions[t],
                                out + t * num_heads * head_size);
        });
        return kDone;
    });
}

EXPORT(qkv_write)
