// Packed weights: unsigned codes of 4 to 8 bits in panels of 16 outputs, with a scale for every 16 or 32 of them.
//
// A panel is cut into groups of 32 inputs, a group into 8 quads of 4 inputs. In each plane a panel's groups follow one
// another:
//   codes   4 bits: 4 × 64 bytes, byte [j][output · 4 + i] has quad 2j in its low half and quad 2j + 1 in its high one;
//           8 bits: 8 × 64 bytes, byte [quad][output · 4 + i]
//   high    the fifth bit: 64 bytes, bit `quad` of byte [output · 4 + i];
//           the fifth and sixth: 2 × 64 bytes, bits 2 · (quad mod 4) of byte [quad / 4][output · 4 + i]
//   scales  16 float16, then 16 float16 minimums where the format has them; with super-scales the same as int8, and one
//           such set for each half of the group if it has two scales
//   supers  for every 8 groups 16 float16 that multiply the scales, then 16 that multiply the minimums
// A weight is scale · (code − offset) + minimum; with levels the code first selects one of 16 bytes.
#pragma once

#include "number.h"

namespace penstock {
namespace PENSTOCK_PATH {

constexpr int64_t kGroup = 32, kQuads = 8, kSuper = 8;  // inputs and quads of a group, groups of a super-scale
constexpr int64_t kQuadBytes = 4 * kLanes;

template <int Bits, int Scales, int Offset, bool Minimum, bool Super, bool Levels>
struct Format {
    static constexpr int kBits = Bits, kScales = Scales, kOffset = Offset;  // kScales: of one group, 1 or 2
    static constexpr bool kMinimum = Minimum, kSupers = Super, kLevels = Levels;
    static constexpr int kCodeBits = Levels ? 8 : Bits;  // as multiplied
    static constexpr int64_t kCodeBytes = kQuadBytes * (Bits == 8 ? 8 : 4);
    static constexpr int64_t kHighBytes = kQuadBytes * (Bits == 5 ? 1 : Bits == 6 ? 2 : 0);
    static constexpr int64_t kSetBytes = kLanes * (Super ? 1 : 2) * (Minimum ? 2 : 1);
    static constexpr int64_t kScaleBytes = kSetBytes * Scales;
    static constexpr int64_t kSuperBytes = Super ? 2 * kLanes * (Minimum ? 2 : 1) : 0;
};

// Numbers as in FORMATS of ops/matmul/packed.py.
template <class Body>
int32_t with_format(int32_t number, const Body& body) {
    switch (number) {
        case 0: return body(Format<4, 1, 8, false, false, false>());
        case 1: return body(Format<4, 1, 0, true, false, false>());
        case 2: return body(Format<5, 1, 16, false, false, false>());
        case 3: return body(Format<5, 1, 0, true, false, false>());
        case 4: return body(Format<8, 1, 128, false, false, false>());
        case 5: return body(Format<4, 2, 0, true, true, false>());
        case 6: return body(Format<4, 2, 4, false, true, false>());
        case 7: return body(Format<4, 1, 0, true, true, false>());
        case 8: return body(Format<5, 1, 0, true, true, false>());
        case 9: return body(Format<6, 2, 32, false, true, false>());
        case 10: return body(Format<4, 1, 128, false, false, true>());
        case 11: return body(Format<4, 1, 128, false, true, true>());
        default: return kBadIndex;
    }
}

// The 16 levels of the IQ4 formats, moved up by 128.
alignas(16) constexpr uint8_t kLevelCodes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                 129, 141, 153, 166, 181, 197, 217, 241};

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
        load_group(reinterpret_cast<const f16*>(from) + part * kLanes, to);
    }
}

// Reads one code; for loops that need no speed.
template <class F>
inline uint8_t code_at(const Panel<F>& panel, int64_t group, int64_t quad, int64_t byte) {
    const uint8_t* codes = panel.codes + group * F::kCodeBytes;
    if constexpr (F::kBits == 8) return codes[quad * kQuadBytes + byte];
    const uint8_t* high = panel.high + group * F::kHighBytes;
    uint8_t code = codes[quad / 2 * kQuadBytes + byte] >> (quad % 2 * 4) & 15;
    if constexpr (F::kBits == 5) code |= (high[byte] >> quad & 1) << 4;
    if constexpr (F::kBits == 6) code |= (high[quad / 4 * kQuadBytes + byte] >> (quad % 4 * 2) & 3) << 4;
    if constexpr (F::kLevels) code = kLevelCodes[code];
    return code;
}

// Widens one group to weights [32][16], exactly as the file's format defines them.
template <class F>
inline void widen_group(const Panel<F>& panel, int64_t group, float* to) {
    float scales[2][kLanes], minimums[2][kLanes] = {};
    for (int set = 0; set < F::kScales; set++) {
        Vec lanes[kParts];
        load_scales(panel, group, set, 0, lanes);
        std::memcpy(scales[set], lanes, sizeof lanes);
        if constexpr (F::kMinimum) {
            load_scales(panel, group, set, 1, lanes);
            std::memcpy(minimums[set], lanes, sizeof lanes);
        }
    }
    for (int64_t quad = 0; quad < kQuads; quad++) {
        const int set = F::kScales == 2 ? int(quad / 4) : 0;
        for (int64_t i = 0; i < 4; i++) {
            for (int64_t o = 0; o < kLanes; o++) {
                const float code = float(int(code_at(panel, group, quad, o * 4 + i)) - F::kOffset);
                const float value = scales[set][o] * code;
                to[(quad * 4 + i) * kLanes + o] = F::kMinimum ? value + minimums[set][o] : value;
            }
        }
    }
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
