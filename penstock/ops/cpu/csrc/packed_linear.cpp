#include "codes.h"
#include "dense.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

#if defined(__AVX512F__)
constexpr int kMostRows = 12, kFewRows = 4, kTogether = 2;
#elif defined(__AVX2__)
constexpr int kMostRows = 6, kFewRows = 4, kTogether = 1;
#else
constexpr int kMostRows = 4, kFewRows = 2, kTogether = 1;
#endif
constexpr int64_t kBlockBytes = 512 * 1024;     // of activations, to stay in the second-level cache

// Panels read in place.
template <class F, int N>
struct Direct {
    using Format = F;
    Panel<F> panels[N];

    void pair(int n, int64_t group, int j, Bytes (&even)[kParts], Bytes (&odd)[kParts]) const {
        load_pair(panels[n], group, j, even, odd);
    }
    void scales(int n, int64_t group, int set, int part, Vec (&to)[kParts]) const {
        load_scales(panels[n], group, set, part, to);
    }
};

// A panel whose codes are bytes already and whose scales are float32, in working memory.
template <class F>
struct Spread {
    using Format = F;
    static constexpr int64_t kParams = F::kScales * (F::kMinimum ? 2 : 1) * kLanes;
    const uint8_t* codes;
    const float* params;

    void pair(int, int64_t group, int j, Bytes (&even)[kParts], Bytes (&odd)[kParts]) const {
        const uint8_t* from = codes + (group * kQuads + 2 * j) * kQuadBytes;
        for (int i = 0; i < kParts; i++) {
            even[i] = load_codes(from + i * sizeof(Bytes));
            odd[i] = load_codes(from + kQuadBytes + i * sizeof(Bytes));
        }
    }
    void scales(int, int64_t group, int set, int part, Vec (&to)[kParts]) const {
        load_group(params + group * kParams + (set * (F::kMinimum ? 2 : 1) + part) * kLanes, to);
    }
};

template <class F>
Spread<F> spread(const Panel<F>& panel, int64_t num_groups) {
    const int64_t params_bytes = num_groups * Spread<F>::kParams * int64_t(sizeof(float));
    uint8_t* memory = static_cast<uint8_t*>(scratch(params_bytes + num_groups * kQuads * kQuadBytes));
    float* params = reinterpret_cast<float*>(memory);
    uint8_t* codes = memory + params_bytes;
    for (int64_t g = 0; g < num_groups; g++) {
        for (int j = 0; j < kQuads / 2; j++) {
            Bytes even[kParts], odd[kParts];
            load_pair(panel, g, j, even, odd);
            uint8_t* to = codes + (g * kQuads + 2 * j) * kQuadBytes;
            std::memcpy(to, even, sizeof even);
            std::memcpy(to + kQuadBytes, odd, sizeof odd);
        }
        for (int set = 0; set < F::kScales; set++)
            for (int part = 0; part < (F::kMinimum ? 2 : 1); part++) {
                Vec lanes[kParts];
                load_scales(panel, g, set, part, lanes);
                std::memcpy(params + g * Spread<F>::kParams + (set * (F::kMinimum ? 2 : 1) + part) * kLanes, lanes,
                            sizeof lanes);
            }
    }
    return {codes, params};
}

// R rows by N panels: for each group in order sum += (dot · scale) · row's scale, then sum += minimum · row's sum.
template <int R, int N, class Source>
ALWAYS_INLINE void integer_tile(const Source& source, const Rounded& x, int64_t num_groups, Vec (&sums)[R][N][kParts]) {
    using F = typename Source::Format;
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            for (int i = 0; i < kParts; i++) sums[r][n][i] = Vec{};
    for (int64_t g = 0; g < num_groups; g++) {
        const auto load = [&](int n, int j, Bytes (&even)[kParts], Bytes (&odd)[kParts]) {
            source.pair(n, g, j, even, odd);
        };
#pragma GCC unroll 2
        for (int set = 0; set < F::kScales; set++) {
            constexpr int kCount = kQuads / F::kScales;
            const int64_t place = (g * F::kScales + set) * R;
            Words total[R][N][kParts];
#if defined(__AVX2__) && !defined(__AVX512F__)
            if constexpr (F::kCodeBits == 8) {
                dot_bytes(x.quads + g * kQuads * R, load, total);
            } else
#endif
            {
                dot_quads<F::kCodeBits, F::kOffset, kCount>(x.quads + g * kQuads * R, x.corrections + place,
                                                            set * kCount, load, total);
            }
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                Vec scale[kParts];
                source.scales(n, g, set, 0, scale);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                    for (int i = 0; i < kParts; i++)
                        sums[r][n][i] = fused(to_float(total[r][n][i]) * scale[i], broadcast(x.scales[g * R + r]),
                                              sums[r][n][i]);
                if constexpr (F::kMinimum) {
                    source.scales(n, g, set, 1, scale);
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                        for (int i = 0; i < kParts; i++)
                            sums[r][n][i] = fused(scale[i], broadcast(x.sums[place + r]), sums[r][n][i]);
                }
            }
        }
    }
}

struct Call {
    Input input;
    Finish finish;
    Planes planes;
    int terms;                          // of the rounded activations
};

template <class F, int N>
inline void few_rows(const Call& call, const RoundedRows& rows, int64_t panel, const Direct<F, N>& source) {
    with_count<kFewRows>(call.input.num_rows * call.terms, [&](auto count) {
        Vec sums[decltype(count)::value][N][kParts];
        integer_tile(source, rows.tile(0), rows.num_groups, sums);
        write_tile(call.finish, 0, panel, sums, call.terms);
    });
}

template <class F>
void multiply_few(const Call& call, const RoundedRows& rows) {
    const Finish& finish = call.finish;
    const int64_t num_panels = finish.num_panels(), together = finish.gated ? 1 : kTogether;
    const int64_t work = rows.num_groups * kGroup * kLanes * together / 2;
    parallel_for(ceil_div(num_panels, together), work, [&](int64_t item) {
        const int64_t panel = item * together;
        const auto at = [&](int64_t p) { return Panel<F>(call.planes, p); };
        if (finish.gated) {
            few_rows(call, rows, panel, Direct<F, 2>{{at(panel), at(panel + num_panels)}});
        } else if (panel + kTogether <= num_panels) {
            if constexpr (kTogether == 2)
                few_rows(call, rows, panel, Direct<F, 2>{{at(panel), at(panel + 1)}});
            else
                few_rows(call, rows, panel, Direct<F, 1>{{at(panel)}});
        } else {
            few_rows(call, rows, panel, Direct<F, 1>{{at(panel)}});
        }
    });
}

// All the tiles of a block of rows by one panel; `gates` holds a gate's values until its up panel comes.
template <class F>
void panel_rows(const Call& call, const RoundedRows& rows, const Heights& heights, int64_t tile, int64_t end,
                int64_t panel, float* gates, bool second) {
    const Finish& finish = call.finish;
    const Spread<F> source = spread(Panel<F>(call.planes, second ? panel + finish.num_panels() : panel), rows.num_groups);
    const int64_t begin = heights.first(tile);
    for (; tile < end; tile++) {
        const int64_t first = heights.first(tile);
        with_count<kMostRows>(heights.rows(tile) * call.terms, [&](auto count) {
            constexpr int R = decltype(count)::value;
            Vec sums[R][1][kParts];
            integer_tile(source, rows.tile(first * call.terms), rows.num_groups, sums);
            if (!finish.gated) return write_tile(finish, first, panel, sums, call.terms);
            float* kept = gates + (first - begin) * kLanes;
            if (!second) return void(std::memcpy(kept, sums, sizeof sums));
            float lanes[R][kLanes];
            std::memcpy(lanes, sums, sizeof sums);
            for (int r = 0; r < R; r++) write_panel(finish, first + r, panel, kept + r * kLanes, lanes[r]);
        });
    }
}

template <class F>
void multiply_many(const Call& call, const RoundedRows& rows, const Heights& heights) {
    const int64_t num_panels = call.finish.num_panels(), num_groups = rows.num_groups;
    const int64_t tile_bytes = heights.height * call.terms * num_groups * kGroup;
    const int64_t block = larger(1, smaller(kBlockBytes / larger(tile_bytes, 1), 1024 / kMostRows));
    const int64_t num_blocks = ceil_div(heights.num_tiles, block);
    const int64_t work = heights.height * block * num_groups * kGroup * kLanes / 8;
    parallel_for(num_blocks * num_panels, work, [&](int64_t item) {
        const int64_t tile = item / num_panels * block, end = smaller(tile + block, heights.num_tiles);
        const int64_t panel = item % num_panels;
        float gates[(1024 + kMostRows) * kLanes];
        panel_rows<F>(call, rows, heights, tile, end, panel, gates, false);
        if (call.finish.gated) panel_rows<F>(call, rows, heights, tile, end, panel, gates, true);
    });
}

template <class F>
void multiply_rounded(const Call& call) {
    const Input& input = call.input;
    const int64_t num_rows = input.num_rows * call.terms;
    const Heights heights(input.num_rows, (num_rows <= kFewRows ? kFewRows : kMostRows) / call.terms);
    const RoundedRows rows(num_rows, call.planes.num_groups, F::kScales);
    parallel_for(heights.num_tiles, heights.height * input.width * 2, [&](int64_t tile) {
        const int64_t first = heights.first(tile), height = heights.rows(tile);
        for (int64_t r = 0; r < height; r++)
            round_row(input.x + (first + r) * input.stride, input.width,
                      {rows, first * call.terms, height * call.terms, r * call.terms}, call.terms, F::kOffset);
    });
    if (num_rows <= kFewRows) return multiply_few<F>(call, rows);
    multiply_many<F>(call, rows, heights);
}

// Float activations: panels are widened to float32 and multiplied as such.
template <class F>
void multiply_float(const Call& call) {
    const int64_t num_panels = call.finish.num_panels(), groups = call.planes.num_groups;
    const int64_t size = groups * kGroup * kLanes, count = call.finish.gated ? 2 : 1;
    parallel_for(num_panels, size * 4, [&](int64_t panel) {
        float* wide = static_cast<float*>(scratch(count * size * sizeof(float)));
        for (int64_t n = 0; n < count; n++)
            for (int64_t g = 0; g < groups; g++)
                widen_group(Panel<F>(call.planes, panel + n * num_panels), g, wide + n * size + g * kGroup * kLanes);
        if (call.finish.gated) {
            const float* const both[2] = {wide, wide + size};
            dense_rows(call.input, call.finish, 0, call.input.num_rows, panel, both);
        } else {
            const float* const one[1] = {wide};
            dense_rows(call.input, call.finish, 0, call.input.num_rows, panel, one);
        }
    });
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(packed_linear)(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, int32_t format,
                      const uint8_t* codes, const uint8_t* high, const uint8_t* scales, const uint8_t* supers,
                      int32_t terms, int64_t num_out, const float* bias, const float* residual,
                      int64_t residual_stride, int32_t activation, int32_t gated, float* out, int64_t out_stride) {
    using namespace penstock::PENSTOCK_PATH;
    const Call call = {{x, x_stride, num_rows, width},
                       {bias, residual, residual_stride, activation, gated, num_out, out, out_stride},
                       {codes, high, scales, supers, ceil_div(width, kGroup)},
                       terms};
    if (num_rows == 0) return kDone;
    if (terms < 0 || terms > 2 || (terms == 2 && gated)) return kBadIndex;
    return with_format(format, [&](auto kind) {
        if (terms) multiply_rounded<decltype(kind)>(call);
        else multiply_float<decltype(kind)>(call);
        return kDone;
    });
}

PACKED(packed_linear)
