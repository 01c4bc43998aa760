// SIMD registers of the path being compiled, and the few lane-wise operations that the kernels use.
//
// Everything sits in a namespace named after the path, and kernels use no inline functions of the standard library:
// the linker keeps one copy of those, and it might be one this machine cannot run.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "runtime/pool.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(PENSTOCK_NEON)
#include <arm_neon.h>
#endif

#define PENSTOCK_JOIN_(a, b) a##b
#define PENSTOCK_JOIN(a, b) PENSTOCK_JOIN_(a, b)
// The C symbol of an op on this path: penstock_linear_avx2, …
#define SYMBOL(name) PENSTOCK_JOIN(penstock_##name##_, PENSTOCK_PATH)
#define VISIBLE extern "C" __attribute__((visibility("default")))
#define KERNEL(name) VISIBLE int32_t SYMBOL(name)
// For the binding: penstock_linear_avx2_packed is the same op with its arguments in an array of 64-bit words, as tapes
// hold them, and penstock_linear_avx2_signature gives a letter per argument.
#define EXPORT(name)                                                              \
    VISIBLE int32_t PENSTOCK_JOIN(SYMBOL(name), _packed)(const uint64_t* words) { \
        return penstock::PENSTOCK_PATH::call_packed(&SYMBOL(name), words);        \
    }                                                                             \
    VISIBLE const char* PENSTOCK_JOIN(SYMBOL(name), _signature)() {               \
        return penstock::PENSTOCK_PATH::signature_of(&SYMBOL(name));              \
    }

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace penstock {
namespace PENSTOCK_PATH {

constexpr int32_t kDone = 0, kBadIndex = 1;  // what a kernel returns

#if defined(__AVX512F__)
constexpr int kWidth = 16;
typedef float Vec __attribute__((vector_size(64)));
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
#elif defined(__AVX2__)
constexpr int kWidth = 8;
typedef float Vec __attribute__((vector_size(32)));
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
#elif defined(PENSTOCK_NEON)
constexpr int kWidth = 4;
typedef float Vec __attribute__((vector_size(16)));
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline Vec broadcast(float x) { return vdupq_n_f32(x); }
#else
constexpr int kWidth = 4;
typedef float Vec __attribute__((vector_size(16)));
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline float fma(float a, float b, float c) { return a * b + c; }
inline Vec broadcast(float x) { return Vec{x, x, x, x}; }
#endif

constexpr int kLanes = 16;               // values per group on every path
constexpr int kParts = kLanes / kWidth;  // registers per group

typedef int32_t IntVec __attribute__((vector_size(sizeof(Vec))));  // comparisons of Vec give -1 or 0 per lane

inline Vec load(const float* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

// Sum over a group's 16 lanes, always in the same order.
inline float sum_lanes(const Vec (&group)[kParts]) {
    float lanes[kLanes];
    std::memcpy(lanes, group, sizeof lanes);
    float a[4];
    for (int i = 0; i < 4; i++) a[i] = (lanes[i] + lanes[i + 8]) + (lanes[i + 4] + lanes[i + 12]);
    return (a[0] + a[2]) + (a[1] + a[3]);
}

// Calls body(item) for every item, in parallel, or on this thread alone if there is little work in all.
template <class Body>
void parallel_for(int64_t count, int64_t work_per_item, const Body& body) {
    constexpr int64_t kWorthwhile = 32768;  // about 10 µs of the simplest work, the cost of waking a thread
    if (count * work_per_item < kWorthwhile) {
        for (int64_t item = 0; item < count; item++) body(item);
        return;
    }
    run_items(
        count, [](void* context, int64_t item) { (*static_cast<const Body*>(context))(item); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

template <class T>
inline T word_as(uint64_t word) {
    T value;
    std::memcpy(&value, &word, sizeof value);  // little endian: small types lie in the low bytes
    return value;
}

template <class... Args, size_t... I>
inline int32_t call_packed(int32_t (*function)(Args...), const uint64_t* words, std::index_sequence<I...>) {
    return function(word_as<Args>(words[I])...);
}

template <class... Args>
inline int32_t call_packed(int32_t (*function)(Args...), const uint64_t* words) {
    return call_packed(function, words, std::index_sequence_for<Args...>{});
}

// Letters as in _ARGUMENTS of library.py, which knows no other.
template <class T>
constexpr char kLetter = '?';
template <class T>
constexpr char kLetter<T*> = 'p';
template <>
constexpr char kLetter<int64_t> = 'n';
template <>
constexpr char kLetter<int32_t> = 'i';
template <>
constexpr char kLetter<float> = 'f';

template <class... Args>
inline const char* signature_of(int32_t (*)(Args...)) {
    static const char letters[] = {kLetter<Args>..., '\0'};
    return letters;
}

template <int Value>
struct Constant {
    static constexpr int value = Value;
};

// Calls body with the count, 1 to Max, as a compile-time constant.
template <int Max, class Body>
inline void with_count(int64_t count, const Body& body) {
    if (count == Max) return body(Constant<Max>());
    if constexpr (Max > 1) with_count<Max - 1>(count, body);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace PENSTOCK_PATH
}  // namespace penstock
