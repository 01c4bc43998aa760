// Packed weights: unsigned codes of 4 to 8 bits in panels of 16 outputs, with a scale for every 16 or 32 of them.
//
// A panel is cut into groups of 32 inputs, a group into 8 quads of 4 inputs. In each plane a panel's groups follow one
// another:
//   codes   4 bits: 4 × 64 bytes, byte [j][output · 4 + i] has quad 2j in its low half and quad 2j + 1 in its high one;
//           8 bits: 8 × 64 bytes, byte [quad][output · 4 + i]
//   high    the fifth bit: 64 bytes, bit `quad` of byte [output · 4 + i];
//           the fifth and sixth: 2 × 64 bytes, bits 2 · (quad mod 4) of byte [quad / 4][output · 4 + i]
//   scales  16 float16 or float32, then 16 minimums of that type or 16 zeros in int8 where the format has them; with
//           super-scales 16 int8, then the minimums in int8; one such set for each half of the group if it has two
//           scales
//   supers  for every 8 groups 16 float16 that multiply the scales, then 16 that multiply the minimums
// A weight is scale · (code − offset − zero) + minimum; with levels the code first selects one of 16.
#pragma once

#include "number.h"

namespace penstock {
namespace PENSTOCK_PATH {

constexpr int64_t kGroup = 32, kQuads = 8, kSuper = 8;  // inputs and quads of a group, groups of a super-scale
constexpr int64_t kQuadBytes = 4 * kLanes;

enum Level : int { kNone, kIQ4, kFP4, kNF4, kIQ2, kIQ3XXS, kIQ3S, kIQ1, kBnbFP4 };  // what codes select from

constexpr int level_bits(Level levels) {  // of levels as multiplied, moved up by the offset
    return levels == kFP4 || levels == kIQ3S || levels == kIQ1 ? 5 : levels == kIQ3XXS ? 6 : 8;
}

template <int Bits, int Scales, int Offset, bool Minimum, bool Super, Level Levels>
struct Format {
    static constexpr int kBits = Bits, kScales = Scales, kOffset = Offset;  // kScales: of one group, 1 or 2
    static constexpr bool kMinimum = Minimum, kSupers = Super, kZeros = false;
    static constexpr Level kLevels = Levels;
    static constexpr int kCodeBits = Levels == kNone ? Bits : level_bits(Levels);  // as multiplied
    static constexpr int64_t kCodeBytes = kQuadBytes * (Bits == 8 ? 8 : 4);
    static constexpr int64_t kHighBytes = kQuadBytes * (Bits == 5 ? 1 : Bits == 6 ? 2 : 0);
    static constexpr int64_t kSetBytes = kLanes * (Super ? 1 : 2) * (Minimum ? 2 : 1);
    static constexpr int64_t kScaleBytes = kSetBytes * Scales;
    static constexpr int64_t kSuperBytes = Super ? 2 * kLanes * (Minimum ? 2 : 1) : 0;
    using Scale = f16;
};

// Scales of type T, and maybe a zero, whose minimum is −scale · zero, or a minimum of that type.
template <int Bits, int Offset, class T, bool Zeros, Level Levels = kNone, int Scales = 1, bool Minimum = false>
struct PlainFormat : Format<Bits, Scales, Offset, Zeros || Minimum, false, Levels> {
    static constexpr bool kZeros = Zeros;
    static constexpr int64_t kSetBytes = kLanes * (int64_t(sizeof(T)) * (Minimum ? 2 : 1) + Zeros);
    static constexpr int64_t kScaleBytes = kSetBytes * Scales;
    using Scale = T;
};

// Numbers as in FORMATS of ops/matmul/packed.py.
template <class Body>
int32_t with_format(int32_t number, const Body& body) {
    switch (number) {
        case 0: return body(Format<4, 1, 8, false, false, kNone>());
        case 1: return body(Format<4, 1, 0, true, false, kNone>());
        case 2: return body(Format<5, 1, 16, false, false, kNone>());
        case 3: return body(Format<5, 1, 0, true, false, kNone>());
        case 4: return body(Format<8, 1, 128, false, false, kNone>());
        case 5: return body(Format<4, 2, 0, true, true, kNone>());
        case 6: return body(Format<4, 2, 4, false, true, kNone>());
        case 7: return body(Format<4, 1, 0, true, true, kNone>());
        case 8: return body(Format<5, 1, 0, true, true, kNone>());
        case 9: return body(Format<6, 2, 32, false, true, kNone>());
        case 10: return body(Format<4, 1, 128, false, false, kIQ4>());
        case 11: return body(Format<4, 1, 128, false, true, kIQ4>());
        case 12: return body(PlainFormat<4, 0, f16, true>());
        case 13: return body(PlainFormat<4, 0, float, true>());
        case 14: return body(PlainFormat<8, 128, float, false>());
        case 15: return body(PlainFormat<8, 128, float, true>());
        case 16: return body(PlainFormat<4, 12, f16, false, kFP4>());
        case 17: return body(PlainFormat<4, 128, float, false, kNF4>());
        case 18: return body(Format<4, 2, 128, false, true, kIQ2>());
        case 19: return body(Format<4, 2, 31, false, true, kIQ3XXS>());
        case 20: return body(Format<4, 1, 15, false, true, kIQ3S>());
        case 21: return body(Format<4, 2, 9, false, true, kIQ1>());
        case 22: return body(PlainFormat<4, 12, float, false, kFP4, 2>());
        case 23: return body(PlainFormat<4, 128, float, false, kBnbFP4>());
        case 24: return body(PlainFormat<4, 0, float, false, kNone, 1, true>());
        default: return kBadIndex;
    }
}

// The levels as multiplied, moved up by the format's offset. Those of NF4 and bitsandbytes' FP4 are rounded.
alignas(16) constexpr uint8_t kLevelCodes[9][16] = {
    {},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0},
    {5, 42, 63, 79, 93, 105, 117, 128, 138, 148, 158, 170, 182, 197, 217, 251},
    {136, 153, 171, 128, 128, 128, 128, 128, 120, 103, 85, 128, 128, 128, 128, 128},
    {33, 37, 41, 45, 49, 53, 57, 62, 29, 25, 21, 17, 13, 9, 5, 0},
    {16, 18, 20, 22, 24, 26, 28, 30, 14, 12, 10, 8, 6, 4, 2, 0},
    {2, 10, 18, 9, 9, 9, 9, 9, 0, 8, 16, 9, 9, 9, 9, 9},
    {128, 129, 208, 248, 168, 188, 148, 158, 128, 127, 48, 8, 88, 68, 108, 98}};

// Steps of a scale, of levels as multiplied: of NF4 the number up to 127 with the smallest error, 0.0029; of
// bitsandbytes' FP4 the one that leaves all but the smallest level exact.
constexpr float kLevelSteps[9] = {1.0f, 1.0f, 1.0f, 123.25f, 8.0f, 2.0f, 1.0f, 8.0f, 120.0f};
constexpr float kNF4Levels[16] = {-1.0f,
                                  -0.6961928009986877f,
                                  -0.5250730514526367f,
                                  -0.39491748809814453f,
                                  -0.28444138169288635f,
                                  -0.18477343022823334f,
                                  -0.09105003625154495f,
                                  0.0f,
                                  0.07958029955625534f,
                                  0.16093020141124725f,
                                  0.24611230194568634f,
                                  0.33791524171829224f,
                                  0.44070982933044434f,
                                  0.5626170039176941f,
                                  0.7229568362236023f,
                                  1.0f};
constexpr float kBnbFP4Levels[8] = {0.0f, 0.005208333333f, 0.66666667f, 1.0f, 0.33333333f,
                                    0.5f, 0.16666667f,     0.25f};  // then the same with a minus

struct Planes {
    const uint8_t *codes, *high, *scales, *supers;
    int64_t num_groups;
};

// One panel's slice of the planes.
template <class F>
struct Panel {
    const uint8_t *codes, *high, *scales, *supers;

    Panel(const Planes& planes, int64_t panel)
        : codes(planes.codes + panel * planes.num_groups * F::kCodeBytes),
          high(planes.high + panel * planes.num_groups * F::kHighBytes),
          scales(planes.scales + panel * planes.num_groups * F::kScaleBytes),
          supers(planes.supers + panel * ceil_div(planes.num_groups, kSuper) * F::kSuperBytes) {}
};

inline void load_bytes(const int8_t* from, Vec (&to)[kParts]) {
#if defined(__AVX512F__)
    to[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
    for (int i = 0; i < kParts; i++)
        to[i] = _mm256_cvtepi32_ps(
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i * kWidth))));
#elif defined(PENSTOCK_NEON)
    widen_bytes(from, to);
#else
    float lanes[kLanes];
    for (int i = 0; i < kLanes; i++) lanes[i] = float(from[i]);
    load_group(lanes, to);
#endif
}

// Scales (part 0) or minimums (part 1) of one set of a group, as float32: exact.
template <class F>
inline void load_scales(const Panel<F>& panel, int64_t group, int set, int part, Vec (&to)[kParts]) {
    const uint8_t* from = panel.scales + group * F::kScaleBytes + set * F::kSetBytes;
    if constexpr (F::kSupers) {
        Vec super[kParts];
        load_bytes(reinterpret_cast<const int8_t*>(from) + part * kLanes, to);
        load_group(reinterpret_cast<const f16*>(panel.supers + group / kSuper * F::kSuperBytes) + part * kLanes, super);
        for (int i = 0; i < kParts; i++) to[i] = to[i] * super[i];
    } else {
        using T = typename F::Scale;
        if constexpr (F::kZeros) {
            load_group(reinterpret_cast<const T*>(from), to);
            if (part == 0) return;
            Vec zeros[kParts];
            load_bytes(reinterpret_cast<const int8_t*>(from + kLanes * sizeof(T)), zeros);
            for (int i = 0; i < kParts; i++) to[i] = Vec{} - to[i] * zeros[i];
        } else {
            load_group(reinterpret_cast<const T*>(from) + part * kLanes, to);
        }
    }
}

// The same for levels as multiplied.
template <class F>
inline void load_level_scales(const Panel<F>& panel, int64_t group, int set, int part, Vec (&to)[kParts]) {
    load_scales(panel, group, set, part, to);
    if constexpr (kLevelSteps[F::kLevels] != 1.0f)
        for (int i = 0; i < kParts; i++) to[i] = to[i] * broadcast(1.0f / kLevelSteps[F::kLevels]);
}

// Reads one code, less the offset, or its level; for loops that need no speed.
template <class F>
inline float code_at(const Panel<F>& panel, int64_t group, int64_t quad, int64_t byte) {
    const uint8_t* codes = panel.codes + group * F::kCodeBytes;
    if constexpr (F::kBits == 8) return float(int(codes[quad * kQuadBytes + byte]) - F::kOffset);
    const uint8_t* high = panel.high + group * F::kHighBytes;
    uint8_t code = codes[quad / 2 * kQuadBytes + byte] >> (quad % 2 * 4) & 15;
    if constexpr (F::kBits == 5) code |= (high[byte] >> quad & 1) << 4;
    if constexpr (F::kBits == 6) code |= (high[quad / 4 * kQuadBytes + byte] >> (quad % 4 * 2) & 3) << 4;
    if constexpr (F::kLevels == kNF4) return kNF4Levels[code];
    if constexpr (F::kLevels == kBnbFP4) return code < 8 ? kBnbFP4Levels[code] : -kBnbFP4Levels[code - 8];
    if constexpr (F::kLevels != kNone) code = kLevelCodes[F::kLevels][code];
    return float(int(code) - F::kOffset) * (1.0f / kLevelSteps[F::kLevels]);  // an integer, or exact eighths
}

// One output's weights of a set, from its scale and its zero or minimum.
template <class F>
inline float weight_of(float code, float scale, float more) {
    if constexpr (F::kZeros) return scale * (code - more);
    const float value = scale * code;
    return F::kMinimum ? value + more : value;
}

// Scales of one set of a group, and its zeros or minimums.
template <class F>
inline void read_scales(const Panel<F>& panel, int64_t group, int set, float (&scales)[kLanes], float (&more)[kLanes]) {
    Vec lanes[kParts];
    load_scales(panel, group, set, 0, lanes);
    std::memcpy(scales, lanes, sizeof lanes);
    if constexpr (F::kZeros) {
        const uint8_t* from = panel.scales + group * F::kScaleBytes + kLanes * sizeof(typename F::Scale);
        load_bytes(reinterpret_cast<const int8_t*>(from), lanes);
        std::memcpy(more, lanes, sizeof lanes);
    } else if constexpr (F::kMinimum) {
        load_scales(panel, group, set, 1, lanes);
        std::memcpy(more, lanes, sizeof lanes);
    }
}

// Widens one group to weights [32][16], exactly as the file's format defines them.
template <class F>
inline void widen_group(const Panel<F>& panel, int64_t group, float* to) {
    float scales[2][kLanes], more[2][kLanes] = {};
    for (int set = 0; set < F::kScales; set++) read_scales(panel, group, set, scales[set], more[set]);
    for (int64_t quad = 0; quad < kQuads; quad++) {
        const int set = F::kScales == 2 ? int(quad / 4) : 0;
        for (int64_t i = 0; i < 4; i++) {
            for (int64_t o = 0; o < kLanes; o++)
                to[(quad * 4 + i) * kLanes + o] =
                    weight_of<F>(code_at(panel, group, quad, o * 4 + i), scales[set][o], more[set][o]);
        }
    }
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
