// The layout of keys and values in the paged cache, and how those of a token are stored.
//
// A block holds keys as [K, D, P], so that a register's lanes are neighbouring positions, and values as [K, P, D].
// int8 codes stand for code · scale, one float32 scale per position and head, [K, P] beside each.
#pragma once

#include "number.h"

namespace penstock {
namespace PENSTOCK_PATH {

enum : int32_t { kInt8 = 3 };

struct i8 {
    int8_t code;
};

inline float widen(i8 x) { return float(x.code); }

#if defined(__AVX512F__)
inline void load_group(const i8* from, Vec (&to)[kParts]) {
    to[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
#elif defined(__AVX2__)
inline void load_group(const i8* from, Vec (&to)[kParts]) {
    for (int i = 0; i < kParts; i++)
        to[i] = _mm256_cvtepi32_ps(
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i * kWidth))));
}
#elif defined(PENSTOCK_NEON)
inline void load_group(const i8* from, Vec (&to)[kParts]) { widen_bytes(&from->code, to); }
#endif

// Calls body with a null pointer of the cache's type.
template <class Body>
int32_t with_cache_type(int32_t type, const Body& body) {
    if (type == kInt8) return body(static_cast<i8*>(nullptr));
    return with_type(type, body);
}

// The paged caches of one layer; strides count elements from block to block.
struct PagedCache {
    void *k, *v;
    int64_t k_stride, v_stride;
    float *k_scale, *v_scale;  // null but for int8
    int64_t k_scale_stride, v_scale_stride;
    int64_t num_blocks, num_heads, block_size, head_size;

    bool has(int64_t slot) const { return slot >= 0 && slot < num_blocks * block_size; }
};

// Rounds at most 16 values. Finite numbers beyond the range of float16 become its largest; infinity and NaN stay.
template <class T>
inline void narrow_some(const float* from, int64_t count, T* to) {
    for (int64_t i = 0; i < count; i++) narrow(from[i], to[i]);
}

inline void narrow_some(const float* from, int64_t count, f16* to) {
    constexpr float kMax = 65504.0f;
    float bounded[kLanes];
    for (int64_t i = 0; i < count; i++) {
        const float x = from[i], size = from_bits(to_bits(x) & 0x7fffffff);
        const float most = from_bits(to_bits(kMax) | (to_bits(x) & 0x80000000));
        bounded[i] = (size > kMax) & (size < __builtin_inff()) ? most : x;
    }
#if defined(__AVX2__)
    if (count == kLanes) {
        for (int i = 0; i < kLanes; i += 8)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(bounded + i), 0));
        return;
    }
#elif defined(PENSTOCK_NEON)
    if (count == kLanes) {
        for (int i = 0; i < kLanes; i += kWidth)
            vst1_u16(&to[i].bits, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(bounded + i))));
        return;
    }
#endif
    for (int64_t i = 0; i < count; i++) narrow(bounded[i], to[i]);
}

// The scale of one head's row of int8 codes, and its inverse. NaN and infinity pass into the scale,
// with codes of 0.
struct HeadScale {
    float scale, inverse;
};

inline HeadScale scale_of(const float* from, int64_t size) {
    float most = 0.0f;
    uint32_t odd = 0;
    for (int64_t d = 0; d < size; d++) {
        const float x = from_bits(to_bits(from[d]) & 0x7fffffff);
        odd |= x < __builtin_inff() ? 0 : to_bits(x);
        most = x > most ? x : most;
    }
    if (odd != 0) return {odd > 0x7f800000 ? __builtin_nanf("") : __builtin_inff(), 0.0f};
    if (most < 0x1p-100f) return {0.0f, 0.0f};
    return {most * (1.0f / 127.0f), 127.0f / most};
}

inline void quantize_some(const float* from, int64_t count, float inverse, i8* to) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t shifted = to_bits(from[i] * inverse + 0x1.8p+23f);  // the nearest integer in the low bits
        to[i].code = inverse > 0.0f ? int8_t(int32_t(shifted) - 0x4b400000) : int8_t(0);
    }
}

// Prefetches the cache lines of a token's keys, one line per value, before the first is written.
template <class T>
inline void prefetch_keys(const PagedCache& cache, int64_t slot) {
    const int64_t block = slot / cache.block_size, place = slot % cache.block_size;
    const T* keys = static_cast<const T*>(cache.k) + block * cache.k_stride + place;
    for (int64_t i = 0; i < cache.num_heads * cache.head_size; i++) __builtin_prefetch(keys + i * cache.block_size, 1);
}

// Writes one head's key and value into slot `slot`.
template <class T>
inline void write_head(const PagedCache& cache, int64_t slot, int64_t head, const float* k, const float* v) {
    constexpr bool kScaled = sizeof(T) == 1;
    const int64_t block = slot / cache.block_size, place = slot % cache.block_size, size = cache.head_size;
    T* keys = static_cast<T*>(cache.k) + block * cache.k_stride + head * size * cache.block_size + place;
    T* values = static_cast<T*>(cache.v) + block * cache.v_stride + (head * cache.block_size + place) * size;
    HeadScale ks = {}, vs = {};
    if constexpr (kScaled) {
        ks = scale_of(k, size), vs = scale_of(v, size);
        cache.k_scale[block * cache.k_scale_stride + head * cache.block_size + place] = ks.scale;
        cache.v_scale[block * cache.v_scale_stride + head * cache.block_size + place] = vs.scale;
    }
    for (int64_t d = 0; d < size; d += kLanes) {
        const int64_t count = min(kLanes, size - d);
        T column[kLanes];
        if constexpr (kScaled) {
            quantize_some(k + d, count, ks.inverse, column);
            quantize_some(v + d, count, vs.inverse, values + d);
        } else {
            narrow_some(k + d, count, column);
            narrow_some(v + d, count, values + d);
        }
        for (int64_t i = 0; i < count; i++) keys[(d + i) * cache.block_size] = column[i];
    }
}

// Copies one head's key and value from one slot to another, as they are stored.
template <class T>
inline void move_head(const PagedCache& cache, int64_t source, int64_t target, int64_t head) {
    const int64_t size = cache.head_size, width = cache.block_size;
    const auto keys = [&](int64_t slot) {
        return static_cast<T*>(cache.k) + slot / width * cache.k_stride + head * size * width + slot % width;
    };
    const auto values = [&](int64_t slot) {
        return static_cast<T*>(cache.v) + slot / width * cache.v_stride + (head * width + slot % width) * size;
    };
    for (int64_t d = 0; d < size; d++) keys(target)[d * width] = keys(source)[d * width];
    std::memmove(values(target), values(source), size * sizeof(T));
    if (cache.k_scale == nullptr) return;
    const auto scale = [&](float* scales, int64_t stride, int64_t slot) -> float& {
        return scales[slot / width * stride + head * width + slot % width];
    };
    scale(cache.k_scale, cache.k_scale_stride, target) = scale(cache.k_scale, cache.k_scale_stride, source);
    scale(cache.v_scale, cache.v_scale_stride, target) = scale(cache.v_scale, cache.v_scale_stride, source);
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
