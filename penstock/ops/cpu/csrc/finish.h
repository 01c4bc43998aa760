// What becomes of a matrix product's sums: bias, residual stream, activation.
#pragma once

#include "activations.h"

namespace penstock {
namespace PENSTOCK_PATH {

constexpr int32_t kNoActivation = -1;

struct Finish {
    const float* bias;                  // one per output of the weight, or null
    const float* residual;              // added to the result, or null
    int64_t residual_stride;
    int32_t activation, gated;          // gated: outputs o and o + num_out of the weight become one
    int64_t num_out;                    // of the result
    float* out;
    int64_t out_stride;

    int64_t num_panels() const { return ceil_div(num_out, kLanes); }
};

inline void add_bias(const Finish& finish, int64_t output, int64_t count, float* lanes) {
    if (finish.bias == nullptr) return;
    for (int64_t i = 0; i < count; i++) lanes[i] = lanes[i] + finish.bias[output + i];
}

// Writes the outputs of one panel for one row; `gate` and `up` are a panel's sums, `up` used only if gated.
__attribute__((noinline)) static void write_panel(const Finish& finish, int64_t row, int64_t panel, float* gate, float* up) {
    const int64_t begin = panel * kLanes, count = smaller(kLanes, finish.num_out - begin);
    add_bias(finish, begin, count, gate);
    if (finish.gated) add_bias(finish, finish.num_out + begin, count, up);
    if (finish.activation != kNoActivation) {
        with_activation(finish.activation, [&](auto kind) {
            for (int64_t i = 0; i < kLanes; i++) gate[i] = decltype(kind)::of(gate[i]);
            return kDone;
        });
    }
    if (finish.gated)
        for (int64_t i = 0; i < kLanes; i++) gate[i] = gate[i] * up[i];
    const float* residual = finish.residual + (finish.residual != nullptr ? row * finish.residual_stride + begin : 0);
    float* out = finish.out + row * finish.out_stride + begin;
    if (count == kLanes) {
        for (int i = 0; i < kLanes; i += kWidth)
            store(out + i, finish.residual != nullptr ? load(residual + i) + load(gate + i) : load(gate + i));
    } else {
        for (int64_t i = 0; i < count; i++) out[i] = finish.residual != nullptr ? residual[i] + gate[i] : gate[i];
    }
}

// Sums of R rows by N panels from (row, panel) on; gated, N is 2: a gate panel and its up panel.
template <int R, int N>
inline void write_tile(const Finish& finish, int64_t row, int64_t panel, const Vec (&sums)[R][N][kParts]) {
    for (int r = 0; r < R; r++) {
        float lanes[N][kLanes];
        std::memcpy(lanes, sums[r], sizeof lanes);
        if (finish.gated) {
            write_panel(finish, row + r, panel, lanes[0], lanes[N - 1]);
        } else {
            for (int n = 0; n < N; n++) write_panel(finish, row + r, panel + n, lanes[n], lanes[N - 1]);
        }
    }
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
