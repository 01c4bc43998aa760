#include "codes.h"
#include "dense.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

#if defined(__AVX512F__)
constexpr int kMostRows = 12, kFewRows = 4, kTogether = 2;
#elif defined(__AVX2__)
constexpr int kMostRows = 6, kFewRows = 4, kTogether = 1;
#elif defined(PENSTOCK_NEON)
constexpr int kMostRows = 6, kFewRows = 4, kTogether = 1;
#else
constexpr int kMostRows = 4, kFewRows = 2, kTogether = 1;
#endif
constexpr int64_t kBlockBytes = 512 * 1024;     // of activations, to stay in the second-level cache

// Panels read in place.
template <class F, int N>
struct Direct {
    using Format = F;
    static constexpr int kOnes = 1;     // rows beyond the call's own: the sums of the codes come with the products
    Panel<F> panels[N];

    void pair(int n, int64_t group, int j, Bytes (&even)[kParts], Bytes (&odd)[kParts]) const {
        load_pair(panels[n], group, j, even, odd);
    }
    void scales(int n, int64_t group, int set, int part, Vec (&to)[kParts]) const {
        load_scales(panels[n], group, set, part, to);
    }
    void code_sums(int64_t, int, const Words (&ones)[kParts], Vec (&to)[kParts]) const {
        for (int i = 0; i < kParts; i++) to[i] = to_float(ones[i]);
    }
};

// A panel whose codes are bytes already and whose scales, minimums and sums of codes are float32, in working memory.
template <class F>
struct Spread {
    using Format = F;
    static constexpr int kOnes = 0;
    static constexpr int kFields = F::kMinimum ? 3 : 2;
    static constexpr int64_t kParams = F::kScales * kFields * kLanes;
    const uint8_t* codes;
    const float* params;

    void pair(int, int64_t group, int j, Bytes (&even)[kParts], Bytes (&odd)[kParts]) const {
        const uint8_t* from = codes + (group * kQuads + 2 * j) * kQuadBytes;
        for (int i = 0; i < kParts; i++) {
            even[i] = load_codes(from + i * sizeof(Bytes));
            odd[i] = load_codes(from + kQuadBytes + i * sizeof(Bytes));
        }
    }
    void quad(int64_t group, int quad, Bytes (&to)[kParts]) const {
        const uint8_t* from = codes + (group * kQuads + quad) * kQuadBytes;
        for (int i = 0; i < kParts; i++) to[i] = load_codes(from + i * sizeof(Bytes));
    }
    void scales(int, int64_t group, int set, int part, Vec (&to)[kParts]) const {
        load_group(params + group * kParams + (set * kFields + part) * kLanes, to);
    }
    void code_sums(int64_t group, int set, const Words (&)[kParts], Vec (&to)[kParts]) const {
        load_group(params + group * kParams + (set * kFields + kFields - 1) * kLanes, to);
    }
};

// A source's codes of one group.
template <class Source>
struct GroupLoad {
    static constexpr bool kByQuad = Source::kOnes == 0;
    const Source& source;
    int64_t group;

    ALWAYS_INLINE void pair(int n, int j, Bytes (&even)[kParts], Bytes (&odd)[kParts]) const {
        source.pair(n, group, j, even, odd);
    }
    ALWAYS_INLINE void quad(int, int quad, Bytes (&to)[kParts]) const { source.quad(group, quad, to); }
};

// Exact sums of products of one set of a group: of the call's rows, and of the row of ones where there is one.
template <int R, int N, class Source>
ALWAYS_INLINE void dot_set(const Source& source, const Rounded& x, int64_t g, int set, Words (&total)[R][N][kParts]) {
    using F = typename Source::Format;
    constexpr int kCount = kQuads / F::kScales;
    const GroupLoad<Source> load = {source, g};
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (F::kCodeBits == 8) return dot_bytes(x.quads + g * kQuads * R, load, total);
#endif
    dot_quads<F::kCodeBits, F::kOffset, kCount>(x.quads + g * kQuads * R, x.corrections + (g * F::kScales + set) * R,
                                                set * kCount, load, total);
}

template <class F>
Spread<F> spread(const Panel<F>& panel, int64_t num_groups) {
    const int64_t params_bytes = num_groups * Spread<F>::kParams * int64_t(sizeof(float));
    uint8_t* memory = static_cast<uint8_t*>(scratch(params_bytes + num_groups * kQuads * kQuadBytes));
    float* params = reinterpret_cast<float*>(memory);
    uint8_t* codes = memory + params_bytes;
    const Direct<F, 1> source = {{panel}};
    const int32_t correction = -F::kOffset * int32_t(kGroup / F::kScales), corrections[2] = {correction, correction};
    int32_t quads[kQuads];
    for (int32_t& quad : quads) quad = 0x01010101;
    for (int64_t g = 0; g < num_groups; g++) {
        for (int j = 0; j < kQuads / 2; j++) {
            Bytes even[kParts], odd[kParts];
            load_pair(panel, g, j, even, odd);
            uint8_t* to = codes + (g * kQuads + 2 * j) * kQuadBytes;
            std::memcpy(to, even, sizeof even);
            std::memcpy(to + kQuadBytes, odd, sizeof odd);
        }
        // The row of ones is the same for every group, so it is kept once and moved back by g groups.
        const Rounded ones = {quads - g * kQuads, corrections - g * F::kScales, nullptr, nullptr, nullptr};
        for (int set = 0; set < F::kScales; set++) {
            float* to = params + g * Spread<F>::kParams + set * Spread<F>::kFields * kLanes;
            Vec lanes[kParts];
            for (int part = 0; part < (F::kMinimum ? 2 : 1); part++, to += kLanes) {
                load_scales(panel, g, set, part, lanes);
                std::memcpy(to, lanes, sizeof lanes);
            }
            Words total[1][1][kParts];
            dot_set(source, ones, g, set, total);
            for (int i = 0; i < kParts; i++) lanes[i] = to_float(total[0][0][i]);
            std::memcpy(to, lanes, sizeof lanes);
        }
    }
    return {codes, params};
}

// R rows by N panels: for each set of codes in order
//   sum += scale · (dot · row's step + sum of codes · row's middle), then sum += minimum · sum of the row's values.
template <int R, int N, class Source>
ALWAYS_INLINE void integer_tile(const Source& source, const Rounded& x, int64_t num_groups, Vec (&sums)[R][N][kParts]) {
    using F = typename Source::Format;
    constexpr int kHeight = R + Source::kOnes;
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            for (int i = 0; i < kParts; i++) sums[r][n][i] = Vec{};
    for (int64_t g = 0; g < num_groups; g++) {
#pragma GCC unroll 2
        for (int set = 0; set < F::kScales; set++) {
            Words total[kHeight][N][kParts];
            dot_set(source, x, g, set, total);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                Vec scale[kParts], codes[kParts];
                source.scales(n, g, set, 0, scale);
                source.code_sums(g, set, total[kHeight - 1][n], codes);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const Vec step = broadcast(x.scales[g * kHeight + r]), middle = broadcast(x.middles[g * kHeight + r]);
#pragma GCC unroll 4
                    for (int i = 0; i < kParts; i++)
                        sums[r][n][i] = fused(scale[i], fused(codes[i], middle, to_float(total[r][n][i]) * step),
                                              sums[r][n][i]);
                }
                if constexpr (F::kMinimum) {
                    source.scales(n, g, set, 1, scale);
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                        for (int i = 0; i < kParts; i++)
                            sums[r][n][i] = fused(scale[i], broadcast(x.sums[(g * F::kScales + set) * kHeight + r]),
                                                  sums[r][n][i]);
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
    const int64_t num_rows = input.num_rows * call.terms, few = num_rows <= kFewRows;
    const Heights heights(input.num_rows, (few ? kFewRows : kMostRows) / call.terms);
    const RoundedRows rows(num_rows + few, call.planes.num_groups, F::kScales);
    parallel_for(heights.num_tiles, heights.height * input.width * 2, [&](int64_t tile) {
        const int64_t first = heights.first(tile), height = heights.rows(tile);
        for (int64_t r = 0; r < height; r++)
            round_row(input.x + (first + r) * input.stride, input.width,
                      {rows, first * call.terms, height * call.terms + few, r * call.terms}, call.terms, F::kOffset);
    });
    if (!few) return multiply_many<F>(call, rows, heights);
    put_ones({rows, 0, num_rows + 1, num_rows}, F::kOffset);
    multiply_few<F>(call, rows);
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
