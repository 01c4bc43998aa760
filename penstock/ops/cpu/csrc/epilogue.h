// The epilogue of a matrix product: bias, activation, gate and residual, applied to its sums.
#pragma once

#include "activations.h"

namespace penstock {
namespace PENSTOCK_PATH {

constexpr int32_t kNoActivation = -1;

struct Epilogue {
    const float* bias;      // one per output of the weight, or null
    const float* residual;  // added to the result, or null
    int64_t residual_stride;
    int32_t activation, gated;  // gated: outputs o and o + num_out of the weight become one
    int64_t num_out;            // of the result
    float* out;
    int64_t out_stride;
    const int32_t* rows = nullptr;  // the place of each row in the result, or null for all in turn

    float* row(int64_t r) const { return out + (rows == nullptr ? r : rows[r]) * out_stride; }
    int64_t num_panels() const { return ceil_div(num_out, kLanes); }
    bool is_plain() const { return bias == nullptr && activation == kNoActivation && !gated; }
};

// Writes the outputs of one panel for some rows; `gate` and `up` hold their sums [row][16], `up` only if gated.
__attribute__((noinline)) static void write_rows(const Epilogue& epilogue, int64_t row, int64_t num_rows, int64_t panel,
                                                 float* gate, float* up) {
    const int64_t begin = panel * kLanes, count = min(kLanes, epilogue.num_out - begin);
    if (epilogue.bias != nullptr) {
        for (int64_t r = 0; r < num_rows; r++) {
            for (int64_t i = 0; i < count; i++) gate[r * kLanes + i] += epilogue.bias[begin + i];
            if (!epilogue.gated) continue;
            for (int64_t i = 0; i < count; i++) up[r * kLanes + i] += epilogue.bias[epilogue.num_out + begin + i];
        }
    }
    if (epilogue.activation != kNoActivation) {
        with_activation(epilogue.activation, [&](auto kind) {
            for (float *lanes = gate, *end = gate + num_rows * kLanes; lanes < end; lanes += kLanes)
                for (int64_t i = 0; i < kLanes; i++) lanes[i] = decltype(kind)::of(lanes[i]);
            if (epilogue.gated)
                for (int64_t i = 0; i < num_rows * kLanes; i++) up[i] = decltype(kind)::up(up[i]);
            return kDone;
        });
    }
    if (epilogue.gated)
        for (int64_t i = 0; i < num_rows * kLanes; i += kWidth) store(gate + i, load(gate + i) * load(up + i));
    for (int64_t r = 0; r < num_rows; r++, gate += kLanes) {
        float* out = epilogue.row(row + r) + begin;
        if (epilogue.residual != nullptr) {
            const float* residual = epilogue.residual + (row + r) * epilogue.residual_stride + begin;
            for (int64_t i = 0; i < count; i++) gate[i] = residual[i] + gate[i];
        }
        if (count == kLanes) std::memcpy(out, gate, kLanes * sizeof(float));
        else
            for (int64_t i = 0; i < count; i++) out[i] = gate[i];
    }
}

// Writes the sums of R rows by N panels from (row, panel) on; if gated, N is 2: a gate panel and its up panel.
template <int R, int N>
inline void write_tile(const Epilogue& epilogue, int64_t row, int64_t panel, const Vec (&sums)[R][N][kParts]) {
    if (epilogue.is_plain() && (panel + N) * kLanes <= epilogue.num_out) {
        for (int r = 0; r < R; r++) {
            float* out = epilogue.row(row + r) + panel * kLanes;
            const float* residual = epilogue.residual + (row + r) * epilogue.residual_stride + panel * kLanes;
            for (int i = 0; i < N * kParts; i++) {
                const Vec sum = sums[r][i / kParts][i % kParts];
                store(out + i * kWidth, epilogue.residual != nullptr ? load(residual + i * kWidth) + sum : sum);
            }
        }
        return;
    }
    float lanes[N][R][kLanes];
    for (int n = 0; n < N; n++)
        for (int r = 0; r < R; r++) std::memcpy(lanes[n][r], sums[r][n], sizeof lanes[n][r]);
    if (epilogue.gated) return write_rows(epilogue, row, R, panel, lanes[0][0], lanes[N - 1][0]);
    for (int n = 0; n < N; n++) write_rows(epilogue, row, R, panel + n, lanes[n][0], nullptr);
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
