// Elementary functions of one float, free of branches and of the C library, so that a loop over them becomes vector
// code with the same bits as a single call. Coefficients: Chebyshev interpolation in extended precision, rounded.
#pragma once

#include "number.h"

namespace penstock {
namespace PENSTOCK_PATH {

// Within 1 ulp; 0 and infinity at the ends, subnormal results included.
inline float exponential(float x) {
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float shifted = fma(x, 0x1.715476p+0f, 0x1.8p+23f);  // the integer nearest to x / ln 2 in the low bits
    const float whole = shifted - 0x1.8p+23f;
    float r = fma(whole, -0x1.63p-1f, x);  // ln 2 = 355/512 - 0x1.bd0106p-13
    r = fma(whole, 0x1.bd0106p-13f, r);
    float p = 0x1.6d11fep-10f;
    p = fma(p, r, 0x1.120c62p-7f);
    p = fma(p, r, 0x1.555518p-5f);
    p = fma(p, r, 0x1.5554dcp-3f);
    p = fma(p, r, 0x1p-1f);
    p = fma(p * r, r, r) + 1.0f;
    const int32_t n = int32_t(to_bits(shifted)) - 0x4b400000, half = n >> 1;
    return p * from_bits(uint32_t(half + 127) << 23) * from_bits(uint32_t(n - half + 127) << 23);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

inline float hyperbolic_tangent(float x) {
    const float z = x * x;
    float p = 0x1.36bdb2p-9f;
    p = fma(p, z, -0x1.1394cap-7f);
    p = fma(p, z, 0x1.64fad8p-6f);
    p = fma(p, z, -0x1.ba0d94p-5f);
    p = fma(p, z, 0x1.1110f6p-3f);
    p = fma(p, z, -0x1.555556p-2f);
    const float near = fma(p * z, x, x);
    const float size = from_bits(to_bits(x) & 0x7fffffff);
    const float far = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
    const float wide = from_bits(to_bits(far) | (to_bits(x) & 0x80000000));
    return size < 0.6f ? near : wide;
}

// The normal distribution function. erfc(a) = exp(-a²) · p(t) / (1 + 2a) with t = (a - 2) / (a + 2), a ≥ 0.
inline float normal_cdf(float x) {
    const float a = from_bits(to_bits(x) & 0x7fffffff) * 0x1.6a09e6p-1f;
    const float bounded = a > 16.0f ? 16.0f : a;
    const float t = (bounded - 2.0f) / (bounded + 2.0f);
    float p = -0x1.517620p-16f;
    p = fma(p, t, 0x1.08a3f4p-14f);
    p = fma(p, t, 0x1.cfb7e4p-13f);
    p = fma(p, t, -0x1.768408p-12f);
    p = fma(p, t, -0x1.7fa752p-10f);
    p = fma(p, t, 0x1.3ef060p-10f);
    p = fma(p, t, 0x1.1de0b8p-7f);
    p = fma(p, t, -0x1.06c12ap-7f);
    p = fma(p, t, -0x1.bc2bfap-5f);
    p = fma(p, t, 0x1.4ff922p-3f);
    p = fma(p, t, -0x1.5407bep-3f);
    p = fma(p, t, -0x1.7bf5dap-4f);
    p = fma(p, t, 0x1.46e80ep+0f);
    const float tail = 0.5f * exponential(-a * a) * p / fma(2.0f, bounded, 1.0f);
    return x < 0.0f ? tail : 1.0f - tail;
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
