// What becomes of a matrix product's sums: bias, residual stream, activation.
#pragma once

#include "activations.h"

namespace penstock {
namespace PENSTOCK_PATH {

constexpr int32_t kNoActivation = -1;

struct Finish {
    const float* bias;      // one per output of the weight, or null
    const float* residual;  // added to the result, or null
    int64_t residual_stride;
    int32_t activation, gated;  // gated: outputs o and o + num_out of the weight become one
    int64_t num_out;            // of the result
    float* out;
    int64_t out_stride;

    int64_t num_panels() const { return ceil_div(num_out, kLanes); }
    bool plain() const { return bias == nullptr && activation == kNoActivation && !gated; }
};

// The outputs of one panel for some rows; `gate` and `up` hold their sums, [row][16] each, `up` used only if gated.
__attribute__((noinline)) static void write_rows(const Finish& finish, int64_t row, int64_t num_rows, int64_t panel,
                                                 float* gate, float* up) {
    const int64_t begin = panel * kLanes, count = smaller(kLanes, finish.num_out - begin);
    if (finish.bias != nullptr) {
        for (int64_t r = 0; r < num_rows; r++) {
            for (int64_t i = 0; i < count; i++) gate[r * kLanes + i] += finish.bias[begin + i];
            if (!finish.gated) continue;
            for (int64_t i = 0; i < count; i++) up[r * kLanes + i] += finish.bias[finish.num_out + begin + i];
        }
    }
    if (finish.activation != kNoActivation) {
        with_activation(finish.activation, [&](auto kind) {
            for (float *lanes = gate, *end = gate + num_rows * kLanes; lanes < end; lanes += kLanes)
                for (int64_t i = 0; i < kLanes; i++) lanes[i] = decltype(kind)::of(lanes[i]);
            return kDone;
        });
    }
    if (finish.gated)
        for (int64_t i = 0; i < num_rows * kLanes; i += kWidth) store(gate + i, load(gate + i) * load(up + i));
    for (int64_t r = 0; r < num_rows; r++, gate += kLanes) {
        float* out = finish.out + (row + r) * finish.out_stride + begin;
        if (finish.residual != nullptr) {
            const float* residual = finish.residual + (row + r) * finish.residual_stride + begin;
            for (int64_t i = 0; i < count; i++) gate[i] = residual[i] + gate[i];
        }
        if (count == kLanes) std::memcpy(out, gate, kLanes * sizeof(float));
        else
            for (int64_t i = 0; i < count; i++) out[i] = gate[i];
    }
}

// Sums of R rows by N panels from (row, panel) on; gated, N is 2: a gate panel and its up panel.
template <int R, int N>
inline void write_tile(const Finish& finish, int64_t row, int64_t panel, const Vec (&sums)[R][N][kParts]) {
    if (finish.plain() && (panel + N) * kLanes <= finish.num_out) {
        for (int r = 0; r < R; r++) {
            float* out = finish.out + (row + r) * finish.out_stride + panel * kLanes;
            const float* residual = finish.residual + (row + r) * finish.residual_stride + panel * kLanes;
            for (int i = 0; i < N * kParts; i++) {
                const Vec sum = sums[r][i / kParts][i % kParts];
                store(out + i * kWidth, finish.residual != nullptr ? load(residual + i * kWidth) + sum : sum);
            }
        }
        return;
    }
    float lanes[N][R][kLanes];
    for (int n = 0; n < N; n++)
        for (int r = 0; r < R; r++) std::memcpy(lanes[n][r], sums[r][n], sizeof lanes[n][r]);
    if (finish.gated) return write_rows(finish, row, R, panel, lanes[0][0], lanes[N - 1][0]);
    for (int n = 0; n < N; n++) write_rows(finish, row, R, panel + n, lanes[n][0], nullptr);
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
