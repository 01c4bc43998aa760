// The layout of keys and values in the paged cache, and how those of a token are stored.
//
// A block holds keys as [K, D, P], so that a register's lanes are neighbouring positions, and values as [K, P, D].
// int8 codes stand for code · scale, one float32 scale per position and head, [K, P] beside each.
// int4 codes stand for code · scale + minimum, both float16, for 32 dimensions of a position and head, or those left.
// A byte holds dimensions i and i + half of such a group; keys are [K, D / 2, P] with scales [K, G, 2, P], values
// [K, P, D / 2] with [K, P, G, 2].
#pragma once

#include "number.h"

namespace penstock {
namespace PENSTOCK_PATH {

enum : int32_t { kInt8 = 3, kInt4 = 4 };

struct i8 {
    int8_t code;
};
struct i4 {
    uint8_t codes;
};

template <class T>
constexpr bool kInPlace = true;  // the tiles of attention read it as it is stored
template <>
constexpr bool kInPlace<i4> = false;

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

// Widens the low and the high codes of 16 bytes.
inline void load_codes(const uint8_t* from, Vec (&low)[kParts], Vec (&high)[kParts]) {
#if defined(__AVX512F__)
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    low[0] = _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(15)));
    high[0] = _mm512_cvtepi32_ps(_mm512_srli_epi32(bytes, 4));
#elif defined(__AVX2__)
    for (int i = 0; i < kParts; i++) {
        const __m256i bytes =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i * kWidth)));
        low[i] = _mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(15)));
        high[i] = _mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4));
    }
#else
    float lanes[2][kLanes];
    for (int i = 0; i < kLanes; i++) lanes[0][i] = float(from[i] & 15), lanes[1][i] = float(from[i] >> 4);
    load_group(lanes[0], low);
    load_group(lanes[1], high);
#endif
}

// Calls body with a null pointer of the cache's type.
template <class Body>
int32_t with_cache_type(int32_t type, const Body& body) {
    if (type == kInt8) return body(static_cast<i8*>(nullptr));
    if (type == kInt4) return body(static_cast<i4*>(nullptr));
    return with_type(type, body);
}

// The paged caches of one layer; strides count elements from block to block.
struct PagedCache {
    void *k, *v;
    int64_t k_stride, v_stride;
    float *k_scale, *v_scale;  // null but for int8; of int4 they are float16
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

// Dimensions per scale of int4 codes.
constexpr int64_t kScaled = 32;

// A group of int4 codes: its first dimension, how many there are, and half of them.
struct CodeGroup {
    int64_t index, begin, count;

    CodeGroup(int64_t index, int64_t head_size)
        : index(index), begin(index * kScaled), count(min(kScaled, head_size - begin)) {}

    static int64_t num(int64_t head_size) { return ceil_div(head_size, kScaled); }
    int64_t half() const { return count / 2; }
};

// Scale and minimum of the codes of a group. A number that is not finite makes the minimum NaN.
struct CodeRange {
    f16 scale, minimum;
    float inverse, least;

    CodeRange(const float* from, int64_t count) {
        float low = from[0], high = from[0];
        bool finite = true;
        for (int64_t i = 0; i < count; i++) {
            finite = finite && from_bits(to_bits(from[i]) & 0x7fffffff) < __builtin_inff();
            low = from[i] < low ? from[i] : low;
            high = from[i] > high ? from[i] : high;
        }
        const float ends[2] = {finite ? low : __builtin_nanf(""), finite ? (high - low) * (1.0f / 15.0f) : 0.0f};
        f16 rounded[2];
        narrow_some(ends, 2, rounded);
        minimum = rounded[0], scale = rounded[1], least = widen(minimum);
        const float step = widen(scale);
        inverse = step > 0.0f ? 1.0f / step : 0.0f;
    }

    uint8_t code(float x) const {
        if (!(inverse > 0.0f)) return 0;
        const float level = (x - least) * inverse;
        const float bounded = level < 0.0f ? 0.0f : level > 15.0f ? 15.0f : level;
        return uint8_t(to_bits(bounded + 0x1.8p+23f) & 15);
    }
};

// Prefetches the cache lines of a token's keys, one line per value, before the first is written.
template <class T>
inline void prefetch_keys(const PagedCache& cache, int64_t slot) {
    const int64_t block = slot / cache.block_size, place = slot % cache.block_size;
    const T* keys = static_cast<const T*>(cache.k) + block * cache.k_stride + place;
    const int64_t rows = cache.num_heads * cache.head_size / (kInPlace<T> ? 1 : 2);
    for (int64_t i = 0; i < rows; i++) __builtin_prefetch(keys + i * cache.block_size, 1);
}

// Writes one head's key and value into slot `slot`.
template <class T>
inline void write_head(const PagedCache& cache, int64_t slot, int64_t head, const float* k, const float* v) {
    constexpr bool kRounded = sizeof(T) == 1;
    const int64_t block = slot / cache.block_size, place = slot % cache.block_size, size = cache.head_size;
    T* keys = static_cast<T*>(cache.k) + block * cache.k_stride + head * size * cache.block_size + place;
    T* values = static_cast<T*>(cache.v) + block * cache.v_stride + (head * cache.block_size + place) * size;
    HeadScale ks = {}, vs = {};
    if constexpr (kRounded) {
        ks = scale_of(k, size), vs = scale_of(v, size);
        cache.k_scale[block * cache.k_scale_stride + head * cache.block_size + place] = ks.scale;
        cache.v_scale[block * cache.v_scale_stride + head * cache.block_size + place] = vs.scale;
    }
    for (int64_t d = 0; d < size; d += kLanes) {
        const int64_t count = min(kLanes, size - d);
        T column[kLanes];
        if constexpr (kRounded) {
            quantize_some(k + d, count, ks.inverse, column);
            quantize_some(v + d, count, vs.inverse, values + d);
        } else {
            narrow_some(k + d, count, column);
            narrow_some(v + d, count, values + d);
        }
        for (int64_t i = 0; i < count; i++) keys[(d + i) * cache.block_size] = column[i];
    }
}

// Where one slot's int4 codes and scales of a head are.
struct CodeSlot {
    i4 *keys, *values;         // keys at steps of `width`
    f16 *k_scales, *v_scales;  // those of the keys at steps of `width`
    int64_t width, head_size;

    CodeSlot(const PagedCache& cache, int64_t slot, int64_t head)
        : width(cache.block_size), head_size(cache.head_size) {
        const int64_t block = slot / width, place = slot % width, bytes = cache.head_size / 2;
        const int64_t scales = 2 * CodeGroup::num(cache.head_size);
        keys = static_cast<i4*>(cache.k) + block * cache.k_stride + head * bytes * width + place;
        values = static_cast<i4*>(cache.v) + block * cache.v_stride + (head * width + place) * bytes;
        k_scales = reinterpret_cast<f16*>(cache.k_scale) + block * cache.k_scale_stride + head * scales * width + place;
        v_scales =
            reinterpret_cast<f16*>(cache.v_scale) + block * cache.v_scale_stride + (head * width + place) * scales;
    }
};

template <>
inline void write_head<i4>(const PagedCache& cache, int64_t slot, int64_t head, const float* k, const float* v) {
    const CodeSlot to(cache, slot, head);
    for (int64_t g = 0; g < CodeGroup::num(cache.head_size); g++) {
        const CodeGroup group(g, cache.head_size);
        const float *keys = k + group.begin, *values = v + group.begin;
        const CodeRange key_range(keys, group.count), value_range(values, group.count);
        to.k_scales[2 * g * to.width] = key_range.scale, to.k_scales[(2 * g + 1) * to.width] = key_range.minimum;
        to.v_scales[2 * g] = value_range.scale, to.v_scales[2 * g + 1] = value_range.minimum;
        for (int64_t i = 0, half = group.half(); i < half; i++) {
            const int64_t byte = group.begin / 2 + i;
            to.keys[byte * to.width].codes = uint8_t(key_range.code(keys[i]) | key_range.code(keys[i + half]) << 4);
            to.values[byte].codes = uint8_t(value_range.code(values[i]) | value_range.code(values[i + half]) << 4);
        }
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

template <>
inline void move_head<i4>(const PagedCache& cache, int64_t source, int64_t target, int64_t head) {
    const CodeSlot from(cache, source, head), to(cache, target, head);
    const int64_t bytes = cache.head_size / 2, scales = 2 * CodeGroup::num(cache.head_size);
    for (int64_t i = 0; i < bytes; i++) to.keys[i * to.width] = from.keys[i * to.width];
    for (int64_t i = 0; i < scales; i++) to.k_scales[i * to.width] = from.k_scales[i * to.width];
    std::memmove(to.values, from.values, bytes);
    std::memmove(to.v_scales, from.v_scales, scales * sizeof(f16));
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
