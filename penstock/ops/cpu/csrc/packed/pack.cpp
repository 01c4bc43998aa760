// Packs GGUF blocks into the planes of layout.h, all panels in parallel.

#include "packed/gguf.h"
#include "packed/layout.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

using gguf::Group;
using gguf::Super;

struct Target {
    uint8_t *codes, *high, *scales, *supers;
    int64_t num_groups;
};

struct Source {
    const uint8_t* raw;
    int64_t row_bytes;
    const int64_t* order;  // the rows to take, or null for all in turn
    int64_t num_rows;
};

inline uint32_t quad_of(const Group& group, int quad) {
    uint32_t word;
    std::memcpy(&word, group.codes + 4 * quad, sizeof word);
    return word;
}

inline void put(uint8_t* to, uint32_t word) { std::memcpy(to, &word, sizeof word); }

template <class F>
inline void put_codes(const Group& group, int64_t lane, uint8_t* codes, uint8_t* high) {
    uint32_t upper[2] = {};
    for (int quad = 0; quad < kQuads; quad++) {
        const uint32_t word = quad_of(group, quad), above = word >> 4;
        if constexpr (F::kBits == 8) put(codes + quad * kQuadBytes + lane * 4, word);
        if constexpr (F::kBits == 5) upper[0] |= (above & 0x01010101) << quad;
        if constexpr (F::kBits == 6) upper[quad / 4] |= (above & 0x03030303) << (quad % 4 * 2);
    }
    if constexpr (F::kBits < 8)
        for (int j = 0; j < kQuads / 2; j++)
            put(codes + j * kQuadBytes + lane * 4,
                (quad_of(group, 2 * j) & 0x0f0f0f0f) | (quad_of(group, 2 * j + 1) & 0x0f0f0f0f) << 4);
    for (int64_t i = 0; i < F::kHighBytes / kQuadBytes; i++) put(high + i * kQuadBytes + lane * 4, upper[i]);
}

template <class F>
inline void put_scales(const Group& group, int64_t lane, uint8_t* to) {
    if constexpr (F::kSupers) {
        for (int set = 0; set < F::kScales; set++) {
            to[set * F::kSetBytes + lane] = uint8_t(group.scales[set]);
            if constexpr (F::kMinimum) to[set * F::kSetBytes + kLanes + lane] = uint8_t(group.minimums[set]);
        }
    } else {
        std::memcpy(to + 2 * lane, &group.scale, 2);
        if constexpr (F::kMinimum) std::memcpy(to + 2 * (kLanes + lane), &group.minimum, 2);
    }
}

template <class F>
inline void put_super(const Super& super, int64_t lane, uint8_t* to) {
    if constexpr (F::kSupers) {
        std::memcpy(to + 2 * lane, &super.scale, 2);
        const uint16_t negative = super.minimum ^ 0x8000;  // minimums are subtracted there, added here
        if constexpr (F::kMinimum) std::memcpy(to + 2 * (kLanes + lane), &negative, 2);
    }
}

template <class Type, class F>
void pack_row(const uint8_t* raw, int64_t row, const Target& target) {
    const int64_t panel = row / kLanes, lane = row % kLanes, num_supers = ceil_div(target.num_groups, kSuper);
    for (int64_t block = 0; block < target.num_groups / Type::kGroups; block++) {
        Group groups[Type::kGroups];
        Super super = {};
        Type::read(raw + block * Type::kBytes, groups, super);
        put_super<F>(super, lane, target.supers + (panel * num_supers + block) * F::kSuperBytes);
        for (int i = 0; i < Type::kGroups; i++) {
            const int64_t place = panel * target.num_groups + block * Type::kGroups + i;
            put_codes<F>(groups[i], lane, target.codes + place * F::kCodeBytes, target.high + place * F::kHighBytes);
            put_scales<F>(groups[i], lane, target.scales + place * F::kScaleBytes);
        }
    }
}

template <class Type, class F>
int32_t pack(const Source& source, const Target& target, int64_t first) {
    if (source.row_bytes * Type::kGroups != target.num_groups * Type::kBytes) return kBadIndex;
    const int64_t begin = first / kLanes, end = ceil_div(first + source.num_rows, kLanes);
    parallel_for(end - begin, target.num_groups * kGroup * kLanes, [&](int64_t item) {
        const int64_t from = max(first, (begin + item) * kLanes);
        const int64_t to = min(first + source.num_rows, (begin + item + 1) * kLanes);
        for (int64_t row = from; row < to; row++) {
            const int64_t index = source.order != nullptr ? source.order[row - first] : row - first;
            pack_row<Type, F>(source.raw + index * source.row_bytes, row, target);
        }
    });
    return kDone;
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

// Rows of GGUF type `type` become the outputs from `first` on; each type has the format of its name in FORMATS.
KERNEL(pack)(int32_t type, const uint8_t* raw, int64_t row_bytes, const int64_t* order, int64_t num_rows, int64_t first,
             int64_t num_groups, uint8_t* codes, uint8_t* high, uint8_t* scales, uint8_t* supers) {
    using namespace penstock::PENSTOCK_PATH;
    namespace gguf = penstock::gguf;
    const Source source = {raw, row_bytes, order, num_rows};
    const Target target = {codes, high, scales, supers, num_groups};
    switch (type) {
        case 2: return pack<gguf::Q4_0, Format<4, 1, 8, false, false, kNone>>(source, target, first);
        case 3: return pack<gguf::Q4_1, Format<4, 1, 0, true, false, kNone>>(source, target, first);
        case 6: return pack<gguf::Q5_0, Format<5, 1, 16, false, false, kNone>>(source, target, first);
        case 7: return pack<gguf::Q5_1, Format<5, 1, 0, true, false, kNone>>(source, target, first);
        case 8: return pack<gguf::Q8_0, Format<8, 1, 128, false, false, kNone>>(source, target, first);
        case 10: return pack<gguf::Q2_K, Format<4, 2, 0, true, true, kNone>>(source, target, first);
        case 11: return pack<gguf::Q3_K, Format<4, 2, 4, false, true, kNone>>(source, target, first);
        case 12: return pack<gguf::Q4_K, Format<4, 1, 0, true, true, kNone>>(source, target, first);
        case 13: return pack<gguf::Q5_K, Format<5, 1, 0, true, true, kNone>>(source, target, first);
        case 14: return pack<gguf::Q6_K, Format<6, 2, 32, false, true, kNone>>(source, target, first);
        case 20: return pack<gguf::Q4_0, Format<4, 1, 128, false, false, kIQ4>>(source, target, first);
        case 23: return pack<gguf::IQ4_XS, Format<4, 1, 128, false, true, kIQ4>>(source, target, first);
        case 39: return pack<gguf::MXFP4, PlainFormat<4, 12, f16, false, kFP4>>(source, target, first);
        default: return kBadIndex;
    }
}

EXPORT(pack)
