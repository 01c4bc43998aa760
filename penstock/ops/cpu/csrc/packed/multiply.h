// Products of rounded rows and packed panels, in tiles of rows.
#pragma once

#include "dense.h"
#include "packed/codes.h"

namespace penstock {
namespace PENSTOCK_PATH {

// Rows of a tile: the most there are, the most with panels read in place, the most with two words to a row's quad.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12, kFewRows = 4, kWideRows = 6, kTogether = 2;
#elif defined(__AVX2__)
constexpr int kMaxRows = 6, kFewRows = 4, kWideRows = 6, kTogether = 1;
#elif defined(PENSTOCK_NEON)
constexpr int kMaxRows = 6, kFewRows = 4, kWideRows = 3, kTogether = 1;
#else
constexpr int kMaxRows = 4, kFewRows = 2, kWideRows = 2, kTogether = 1;
#endif
template <class Kind>
constexpr int kMaxHeight = Kind::kWords == 2 ? kWideRows : kMaxRows;
template <class Kind>
constexpr int kMaxInPlace = Kind::kXBits == 16 ? kFewRows / 2 : kFewRows;
constexpr int64_t kBlockBytes = 512 * 1024;  // of activations, to stay in the second-level cache
constexpr int64_t kBlockRows = 1024;

// Panels read in place.
template <class K, int N>
struct Direct {
    using Kind = K;
    using Format = typename K::Format;
    static constexpr int kOnes = K::kXBits == 8;  // extra rows of ones, whose products are the sums of codes
    static constexpr bool kByQuad = false;
    Panel<Format> panels[N];

    void pair(int n, int64_t group, int j, Bytes (&even)[kParts], Bytes (&odd)[kParts]) const {
        load_pair(panels[n], group, j, even, odd);
    }
    void scales(int n, int64_t group, int set, int part, Vec (&to)[kParts]) const {
        load_level_scales(panels[n], group, set, part, to);
    }
    void code_sums(int64_t, int, const Words (&ones)[kParts], Vec (&to)[kParts]) const {
        for (int i = 0; i < kParts; i++) to[i] = to_float(ones[i]);
    }
};

// A panel unpacked to scratch memory: codes as bytes; scales, minimums and sums of codes as float32.
template <class K>
struct Spread {
    using Kind = K;
    using Format = typename K::Format;
    static constexpr int kOnes = 0;
    static constexpr bool kByQuad = true;
    static constexpr int kFields = Format::kMinimum ? 3 : 2;
    static constexpr int64_t kParams = Format::kScales * kFields * kLanes;
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

struct NothingAhead {
    void fetch(int64_t) const {}
};

// Prefetches the next panel while a tile is computed. Each tile fetches two cache lines of every group's codes, the
// first one also scales and high bits.
template <class F>
struct Ahead {
    Panel<F> panel;
    int64_t at;  // F::kCodeBytes: nothing is left to fetch

    ALWAYS_INLINE void fetch(int64_t group) const {
        if (at >= F::kCodeBytes) return;
        const uint8_t* codes = panel.codes + group * F::kCodeBytes + at;
        __builtin_prefetch(codes);
        __builtin_prefetch(codes + 64);
        if (at != 0) return;
        __builtin_prefetch(panel.scales + group * F::kScaleBytes);
        for (int64_t byte = 0; byte < F::kHighBytes; byte += 64)
            __builtin_prefetch(panel.high + group * F::kHighBytes + byte);
    }
};

// A source's codes of one group.
template <class Source>
struct GroupLoad {
    static constexpr bool kByQuad = Source::kByQuad;
    const Source& source;
    int64_t group;

    ALWAYS_INLINE void pair(int n, int j, Bytes (&even)[kParts], Bytes (&odd)[kParts]) const {
        source.pair(n, group, j, even, odd);
    }
    ALWAYS_INLINE void quad(int, int quad, Bytes (&to)[kParts]) const { source.quad(group, quad, to); }
};

// Exact sums of products of one set of a group: of the call's rows, and of the row of ones where there is one.
template <int H, int N, class Source>
ALWAYS_INLINE void dot_set(const Source& source, const Rounded& x, int64_t g, int set, Words (&total)[H][N][kParts]) {
    using F = typename Source::Format;
    using Kind = typename Source::Kind;
    constexpr int kCount = kQuads / F::kScales;
    const int32_t* quads = x.quads + g * kQuads * H * Kind::kWords;
    const int32_t* corrections = x.corrections + (g * F::kScales + set) * H * Kind::kSums;
    const GroupLoad<Source> load = {source, g};
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (Kind::kPairs) return dot_pairs<F::kOffset, kCount>(quads, corrections, set * kCount, load, total);
#endif
    if constexpr (Kind::kSums == 1) {
        dot_quads<F::kCodeBits, F::kOffset, kCount>(quads, corrections, set * kCount, load, total);
    } else {
        Words bytes[2 * H][N][kParts];
        dot_quads<F::kCodeBits, F::kOffset, kCount>(quads, corrections, set * kCount, load, bytes);
#pragma GCC unroll 8
        for (int r = 0; r < H; r++)
#pragma GCC unroll 2
            for (int n = 0; n < N; n++)
#pragma GCC unroll 4
                for (int i = 0; i < kParts; i++)
                    total[r][n][i] = add_words(shift_words(bytes[2 * r][n][i], 8), bytes[2 * r + 1][n][i]);
    }
}

template <class Kind>
Spread<Kind> spread(const Panel<typename Kind::Format>& panel, int64_t num_groups) {
    using F = typename Kind::Format;
    constexpr int64_t kParams = Spread<Kind>::kParams;
    const int64_t params_bytes = num_groups * kParams * int64_t(sizeof(float));
    uint8_t* memory = static_cast<uint8_t*>(scratch(params_bytes + num_groups * kQuads * kQuadBytes));
    const Spread<Kind> result = {memory + params_bytes, reinterpret_cast<float*>(memory)};
    float* params = reinterpret_cast<float*>(memory);
    uint8_t* codes = memory + params_bytes;
    for (int64_t g = 0; g < num_groups; g++) {
#pragma GCC unroll 2
        for (int set = 0; set < F::kScales; set++) {
            CodeSum<F> sum;
            sum.begin();
#pragma GCC unroll 4
            for (int j = 0; j < kQuads / F::kScales / 2; j++, codes += 2 * kQuadBytes) {
                Bytes even[kParts], odd[kParts];
                load_pair(panel, g, set * 2 + j, even, odd);
#pragma GCC unroll 4
                for (int i = 0; i < kParts; i++) {
                    store_codes(codes + i * sizeof(Bytes), even[i]);
                    store_codes(codes + kQuadBytes + i * sizeof(Bytes), odd[i]);
                    if (Kind::kXBits == 16) continue;
                    sum.add(i, even[i]);
                    sum.add(i, odd[i]);
                }
            }
#pragma GCC unroll 2
            for (int part = 0; part < (F::kMinimum ? 2 : 1); part++, params += kLanes) {
                Vec lanes[kParts];
                load_level_scales(panel, g, set, part, lanes);
#pragma GCC unroll 4
                for (int i = 0; i < kParts; i++) store(params + i * kWidth, lanes[i]);
            }
            if (Kind::kXBits == 8)
#pragma GCC unroll 4
                for (int i = 0; i < kParts; i++) store(params + i * kWidth, sum.total(i));
            params += kLanes;
        }
    }
    return result;
}

// R rows by N panels: for each set of codes in order
//   sum += scale · (dot · row's step + sum of codes · row's middle), then sum += minimum · sum of the row's values.
// Activations of 16 bits have no middle.
template <int R, int N, class Source, class Next = NothingAhead>
ALWAYS_INLINE void sum_integer_tile(const Source& source, const Rounded& x, int64_t num_groups,
                                    Vec (&sums)[R][N][kParts], const Next& next = {}) {
    using F = typename Source::Format;
    constexpr int kHeight = R + Source::kOnes;
    constexpr bool kCentered = Source::Kind::kXBits == 8;
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            for (int i = 0; i < kParts; i++) sums[r][n][i] = Vec{};
    for (int64_t g = 0; g < num_groups; g++) {
        next.fetch(g);
#pragma GCC unroll 2
        for (int set = 0; set < F::kScales; set++) {
            Words total[kHeight][N][kParts];
            dot_set(source, x, g, set, total);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                Vec scale[kParts], codes[kParts];
                source.scales(n, g, set, 0, scale);
                if constexpr (kCentered) source.code_sums(g, set, total[kHeight - 1][n], codes);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const Vec step = broadcast(x.steps[g * kHeight + r]);
#pragma GCC unroll 4
                    for (int i = 0; i < kParts; i++) {
                        Vec value = to_float(total[r][n][i]) * step;
                        if constexpr (kCentered) value = fma(codes[i], broadcast(x.middles[g * kHeight + r]), value);
                        sums[r][n][i] = fma(scale[i], value, sums[r][n][i]);
                    }
                }
                if constexpr (F::kMinimum) {
                    source.scales(n, g, set, 1, scale);
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                        for (int i = 0; i < kParts; i++)
                            sums[r][n][i] =
                                fma(scale[i], broadcast(x.sums[(g * F::kScales + set) * kHeight + r]), sums[r][n][i]);
                }
            }
        }
    }
}

struct Call {
    Input input;
    const float* norm;  // RMS norm weights applied to the rows before rounding, or null
    float eps;
    Epilogue epilogue;
    Planes planes;
};

template <class Kind, int N>
inline void multiply_in_place(const Call& call, const RoundedRows<Kind>& rows, int64_t panel,
                              const Direct<Kind, N>& source) {
    with_count<kMaxInPlace<Kind>>(call.input.num_rows, [&](auto count) {
        Vec sums[decltype(count)::value][N][kParts];
        sum_integer_tile(source, rows.tile(0), rows.num_groups, sums);
        write_tile(call.epilogue, 0, panel, sums);
    });
}

template <class Kind>
int64_t num_few_items(const Call& call) {
    return ceil_div(call.epilogue.num_panels(), call.epilogue.gated ? 1 : kTogether);
}

// Multiplies a few rows by the panels of an item, read in place.
template <class Kind>
inline void multiply_few(const Call& call, const RoundedRows<Kind>& rows, int64_t item) {
    const Epilogue& epilogue = call.epilogue;
    const int64_t num_panels = epilogue.num_panels(), panel = item * (epilogue.gated ? 1 : kTogether);
    const auto at = [&](int64_t p) { return Panel<typename Kind::Format>(call.planes, p); };
    if (epilogue.gated) {
        if constexpr (Kind::kXBits == 8)
            multiply_in_place(call, rows, panel, Direct<Kind, 2>{{at(panel), at(panel + num_panels)}});
    } else if (panel + kTogether <= num_panels) {
        if constexpr (kTogether == 2) multiply_in_place(call, rows, panel, Direct<Kind, 2>{{at(panel), at(panel + 1)}});
        else multiply_in_place(call, rows, panel, Direct<Kind, 1>{{at(panel)}});
    } else {
        multiply_in_place(call, rows, panel, Direct<Kind, 1>{{at(panel)}});
    }
}

// Multiplies all tiles of a block of rows by one panel; `gates` keeps a gate's sums until its up panel is done.
template <class Kind>
void multiply_panel(const Call& call, const RoundedRows<Kind>& rows, const Heights& heights, int64_t tile, int64_t end,
                    int64_t panel, float* gates, bool second) {
    using F = typename Kind::Format;
    const Epilogue& epilogue = call.epilogue;
    const int64_t num_panels = epilogue.num_panels();
    const Spread<Kind> source =
        spread<Kind>(Panel<F>(call.planes, second ? panel + num_panels : panel), rows.num_groups);
    const bool last = panel + 1 == num_panels && (second || !epilogue.gated);
    Ahead<F> next = {Panel<F>(call.planes, last                        ? panel
                                           : second || !epilogue.gated ? panel + 1
                                                                       : panel + num_panels),
                     last ? F::kCodeBytes : 0};
    const int64_t begin = heights.first(tile);
    for (; tile < end; tile++, next.at += 128) {
        const int64_t first = heights.first(tile);
        with_count<kMaxHeight<Kind>>(heights.rows(tile), [&](auto count) {
            constexpr int R = decltype(count)::value;
            Vec sums[R][1][kParts];
            sum_integer_tile(source, rows.tile(first), rows.num_groups, sums, next);
            if (!epilogue.gated) return write_tile(epilogue, first, panel, sums);
            float* kept = gates + (first - begin) * kLanes;
            if (!second) return void(std::memcpy(kept, sums, sizeof sums));
            float lanes[R][kLanes];
            std::memcpy(lanes, sums, sizeof sums);
            write_rows(epilogue, first, R, panel, kept, lanes[0]);
        });
    }
}

// Tiles of rows that are multiplied by a panel while it is unpacked.
template <class Kind>
struct Blocks {
    Heights heights;
    int64_t tiles;  // of a block

    Blocks(int64_t num_rows, int64_t num_groups) : heights(num_rows, kMaxHeight<Kind>) {
        const int64_t tile_bytes = heights.height * Kind::kWords * num_groups * kGroup;
        tiles = max(1, min(kBlockBytes / max(tile_bytes, 1), kBlockRows / kMaxHeight<Kind>));
    }

    int64_t num_items(const Call& call) const {
        return ceil_div(heights.num_tiles, tiles) * call.epilogue.num_panels();
    }

    void multiply(const Call& call, const RoundedRows<Kind>& rows, int64_t item) const {
        const int64_t num_panels = call.epilogue.num_panels(), panel = item % num_panels;
        const int64_t tile = item / num_panels * tiles, end = min(tile + tiles, heights.num_tiles);
        float gates[(kBlockRows + kMaxRows) * kLanes];
        multiply_panel(call, rows, heights, tile, end, panel, gates, false);
        if (call.epilogue.gated) multiply_panel(call, rows, heights, tile, end, panel, gates, true);
    }
};

// Float activations: a panel, or a gate and its up panel, is widened to float32 and multiplied by multiply_dense.
template <class F>
void multiply_widened(const Call& call, int64_t panel) {
    const int64_t num_panels = call.epilogue.num_panels(), groups = call.planes.num_groups;
    const int64_t size = groups * kGroup * kLanes, count = call.epilogue.gated ? 2 : 1;
    float* wide = static_cast<float*>(scratch(count * size * sizeof(float)));
    for (int64_t n = 0; n < count; n++)
        for (int64_t g = 0; g < groups; g++)
            widen_group(Panel<F>(call.planes, panel + n * num_panels), g, wide + n * size + g * kGroup * kLanes);
    if (call.epilogue.gated) {
        const float* const both[2] = {wide, wide + size};
        multiply_dense(call.input, call.epilogue, 0, call.input.num_rows, panel, both);
    } else {
        const float* const one[1] = {wide};
        multiply_dense(call.input, call.epilogue, 0, call.input.num_rows, panel, one);
    }
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
