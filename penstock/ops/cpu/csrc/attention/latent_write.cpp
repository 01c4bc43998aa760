#include "attention/cache.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

struct LatentCache {  // stride: elements from block to block
    void* latents;
    int64_t stride, num_blocks, block_size, width;

    bool has(int64_t slot) const { return slot >= 0 && slot < num_blocks * block_size; }

    template <class T>
    T* at(int64_t slot) const {
        return static_cast<T*>(latents) + slot / block_size * stride + slot % block_size * width;
    }
};

template <class T>
void write_numbers(const float* from, int64_t count, T* to) {
    for (int64_t d = 0; d < count; d += kLanes) narrow_some(from + d, min(kLanes, count - d), to + d);
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(latent_write)(const float* latent, int64_t latent_stride, const float* k_rope, int64_t rope_stride, void* cache,
                     int64_t stride, int32_t type, const int64_t* slots, int64_t num_tokens, int64_t num_blocks,
                     int64_t block_size, int64_t rank, int64_t width) {
    using namespace penstock::PENSTOCK_PATH;
    const LatentCache latents = {cache, stride, num_blocks, block_size, width};
    for (int64_t t = 0; t < num_tokens; t++)
        if (!latents.has(slots[t])) return kBadIndex;
    return with_type(type, [&](auto* typed) {
        using Stored = typename Pointee<decltype(typed)>::Type;
        parallel_for(num_tokens, 4 * width, [&](int64_t t) {
            Stored* to = latents.at<Stored>(slots[t]);
            write_numbers(latent + t * latent_stride, rank, to);
            write_numbers(k_rope + t * rope_stride, width - rank, to + rank);
        });
        return kDone;
    });
}

KERNEL(latent_move)(void* cache, int64_t stride, int32_t type, const int64_t* moves, int64_t num_moves,
                    int64_t num_blocks, int64_t block_size, int64_t width) {
    using namespace penstock::PENSTOCK_PATH;
    const LatentCache latents = {cache, stride, num_blocks, block_size, width};
    for (int64_t i = 0; i < 2 * num_moves; i++)
        if (!latents.has(moves[i])) return kBadIndex;
    return with_type(type, [&](auto* typed) {
        using Stored = typename Pointee<decltype(typed)>::Type;
        for (int64_t i = 0; i < num_moves; i++)
            std::memmove(latents.at<Stored>(moves[2 * i + 1]), latents.at<Stored>(moves[2 * i]),
                         width * sizeof(Stored));
        return kDone;
    });
}

EXPORT(latent_write)
EXPORT(latent_move)
