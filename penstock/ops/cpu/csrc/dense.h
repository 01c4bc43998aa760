// GEMV and GEMM with weights of 16 or 32 bits in panels [width][16].
#pragma once

#include "tiles.h"

namespace penstock {
namespace PENSTOCK_PATH {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kAccumulators = 24;  // registers of 32
#else
constexpr int kAccumulators = 12;  // registers of 16
#endif
constexpr int64_t kAhead = 64;  // prefetch distance in inputs

struct Input {
    const float* x;
    int64_t stride, num_rows, width;
};

// R rows by N panels. Every output is one chain of fused products over the width, in order, whatever R and N are.
template <int R, int N, class T>
ALWAYS_INLINE void sum_dense_tile(const Input& input, int64_t row, const T* const (&panels)[N],
                                  Vec (&sums)[R][N][kParts]) {
    const float* x = input.x + row * input.stride;
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            for (int i = 0; i < kParts; i++) sums[r][n][i] = Vec{};
    for (int64_t c = 0; c < input.width; c++) {
        Vec w[N][kParts];
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) {
            load_group(panels[n] + c * kLanes, w[n]);
            if constexpr (R <= 2) __builtin_prefetch(panels[n] + (c + kAhead) * kLanes);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const Vec value = broadcast(x[r * input.stride + c]);
#pragma GCC unroll 16
            for (int n = 0; n < N; n++)
#pragma GCC unroll 16
                for (int i = 0; i < kParts; i++) sums[r][n][i] = fma(value, w[n][i], sums[r][n][i]);
        }
    }
}

// Multiplies the rows [row, end) by N neighbouring panels, or by a gate panel and its up panel.
template <int N, class T>
inline void multiply_dense(const Input& input, const Epilogue& epilogue, int64_t row, int64_t end, int64_t panel,
                           const T* const (&panels)[N]) {
    constexpr int kMax = kAccumulators / kParts / N;
    const Heights heights(end - row, kMax);
    for (int64_t tile = 0; tile < heights.num_tiles; tile++) {
        with_count<kMax>(heights.rows(tile), [&](auto count) {
            Vec sums[decltype(count)::value][N][kParts];
            const int64_t first = row + heights.first(tile);
            sum_dense_tile(input, first, panels, sums);
            write_tile(epilogue, first, panel, sums);
        });
    }
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
