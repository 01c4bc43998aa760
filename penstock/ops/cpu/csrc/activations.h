// The kinds of activation, numbered as in KINDS of the op activation.
#pragma once

#include "elementary.h"

namespace penstock {
namespace PENSTOCK_PATH {

// Of a gated product, a kind applies to the gate, and `up` to the other half.
struct Activation {
    static float up(float x) { return x; }
};
struct Silu : Activation {
    static float of(float x) { return x * sigmoid(x); }
};
struct Gelu : Activation {
    static float of(float x) { return x * normal_cdf(x); }
};
// x/2 · (1 + tanh u) = x · sigmoid(2u), u = sqrt(2/π) · (x + 0.044715 x³)
struct GeluTanh : Activation {
    static float of(float x) { return x * sigmoid(1.5957691216f * fma(0.044715f * x * x, x, x)); }
};
struct Relu : Activation {
    static float of(float x) { return x > 0.0f || x != x ? x : 0.0f; }
};
struct Relu2 : Activation {
    static float of(float x) { return Relu::of(x) * Relu::of(x); }
};
struct QuickGelu : Activation {
    static float of(float x) { return x * sigmoid(1.702f * x); }
};
struct SwigluOai {
    static constexpr float kLimit = 7.0f;
    static float of(float x) { return QuickGelu::of(x > kLimit ? kLimit : x); }
    static float up(float x) {
        const float low = x > kLimit ? kLimit : x;
        return (low < -kLimit ? -kLimit : low) + 1.0f;
    }
};

// Calls body with an object of the kind's type.
template <class Body>
int32_t with_activation(int32_t kind, const Body& body) {
    switch (kind) {
        case 0: return body(Silu());
        case 1: return body(Gelu());
        case 2: return body(GeluTanh());
        case 3: return body(Relu());
        case 4: return body(Relu2());
        case 5: return body(QuickGelu());
        case 6: return body(SwigluOai());
        default: return kBadIndex;
    }
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
