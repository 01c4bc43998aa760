// Stored number formats: float32, bfloat16 and float16, widened exactly and rounded to nearest even.
#pragma once

#include "simd.h"

namespace penstock {
namespace PENSTOCK_PATH {

enum : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

inline float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline uint32_t to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float widen(float x) { return x; }

inline float widen(bf16 x) { return from_bits(uint32_t(x.bits) << 16); }

inline float widen(f16 x) {
    // Moving the exponent's bias from 15 to 127 by a product serves subnormal numbers too.
    const float magnitude = from_bits(uint32_t(x.bits & 0x7fff) << 13) * 0x1p112f;
    const uint32_t special = (x.bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    return from_bits(to_bits(magnitude) | special | uint32_t(x.bits & 0x8000) << 16);
}

inline void narrow(float x, float& to) { to = x; }

inline void narrow(float x, bf16& to) {
    const uint32_t bits = to_bits(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    to.bits = uint16_t(x != x ? 0x7fc0 : rounded);
}

inline void narrow(float x, f16& to) {
    const uint32_t bits = to_bits(x), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    uint32_t rounded;
    if (magnitude >= 0x47800000) {  // 65536 and above
        rounded = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    } else if (magnitude < 0x38800000) {  // below the smallest normal: the sum rounds at the right bit
        rounded = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000;
    } else {
        rounded = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    }
    to.bits = uint16_t(rounded | sign);
}

inline void load_group(const float* from, Vec (&to)[kParts]) {
    for (int i = 0; i < kParts; i++) to[i] = load(from + i * kWidth);
}

#if defined(__AVX512F__)
inline __m256i load_halves(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline void load_group(const bf16* from, Vec (&to)[kParts]) {
    to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(from)), 16));
}

inline void load_group(const f16* from, Vec (&to)[kParts]) { to[0] = _mm512_cvtph_ps(load_halves(from)); }
#elif defined(__AVX2__)
inline __m128i load_halves(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }

inline void load_group(const bf16* from, Vec (&to)[kParts]) {
    for (int i = 0; i < kParts; i++)
        to[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(from + i * kWidth)), 16));
}

inline void load_group(const f16* from, Vec (&to)[kParts]) {
    for (int i = 0; i < kParts; i++) to[i] = _mm256_cvtph_ps(load_halves(from + i * kWidth));
}
#elif defined(PENSTOCK_NEON)
inline void load_group(const bf16* from, Vec (&to)[kParts]) {
    for (int i = 0; i < kParts; i++)
        to[i] = vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(&from[i * kWidth].bits)), 16));
}

inline void load_group(const f16* from, Vec (&to)[kParts]) {
    for (int i = 0; i < kParts; i++) to[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from[i * kWidth].bits)));
}

inline void widen_bytes(const int8_t* from, Vec (&to)[kParts]) {
    const int8x16_t bytes = vld1q_s8(from);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    to[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    to[1] = vcvtq_f32_s32(vmovl_high_s16(low));
    to[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    to[3] = vcvtq_f32_s32(vmovl_high_s16(high));
}
#else
template <class T>
inline void load_group(const T* from, Vec (&to)[kParts]) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; i++) lanes[i] = widen(from[i]);
    load_group(lanes, to);
}
#endif

template <class T>
struct Pointee;
template <class T>
struct Pointee<T*> {
    using Type = T;
};

// Calls body with a null pointer of the stored type.
template <class Body>
int32_t with_type(int32_t type, const Body& body) {
    switch (type) {
        case kFloat32: return body(static_cast<float*>(nullptr));
        case kBfloat16: return body(static_cast<bf16*>(nullptr));
        default: return body(static_cast<f16*>(nullptr));
    }
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
