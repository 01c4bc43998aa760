// Activations rounded to integers in groups of 32. In 8 bits a group is a step times integers of −127 … 127 plus the
// middle of its range; in 16 bits, where that is too coarse, a step times integers of −32512 … 32512.
#pragma once

#include "packed/layout.h"
#include "tiles.h"

namespace penstock {
namespace PENSTOCK_PATH {

// The layout of activations of XBits bits for a format's codes. AVX2 has no exact product of an unsigned byte and more
// than seven bits; there, such activations are pairs of 16 bits. Elsewhere 16 bits are a high and a low byte, with a
// sum for each.
template <class F, int XBits>
struct Kind {
    using Format = F;
    static constexpr int kXBits = XBits;
#if defined(__AVX2__) && !defined(__AVX512F__)
    static constexpr bool kPairs = XBits == 16 || F::kCodeBits == 8;
#else
    static constexpr bool kPairs = false;
#endif
    static constexpr int kWords = XBits == 16 || kPairs ? 2 : 1;  // of a row's quad
    static constexpr int kSums = XBits == 16 && !kPairs ? 2 : 1;  // of a row's products with an output
};

// Rows of activations, value by value beside each other: entry [group][…][row].
struct Rounded {
    const int32_t* quads;          // [group][quad][row][word]: four integers
    const int32_t* corrections;    // [group][set][row][sum]: −offset · sum of the integers
    const float *steps, *middles;  // [group][row]
    const float* sums;             // [group][set][row]: of the rounded values; for minimums
};

// Memory for the rounded rows of a call; a tile of rows is contiguous.
template <class Kind>
struct RoundedRows {
    static constexpr int64_t kSets = Kind::Format::kScales;
    int64_t num_groups;
    int32_t *quads, *corrections;
    float *steps, *middles, *sums;

    static size_t num_bytes(int64_t num_rows, int64_t groups) {
        return num_rows * groups * (kQuads * Kind::kWords + kSets * (Kind::kSums + 1) + 2) * sizeof(int32_t);
    }

    RoundedRows(int64_t num_rows, int64_t groups, void* memory) : num_groups(groups) {
        const int64_t cells = num_rows * groups;
        quads = static_cast<int32_t*>(memory);
        corrections = quads + cells * kQuads * Kind::kWords;
        steps = reinterpret_cast<float*>(corrections + cells * kSets * Kind::kSums);
        middles = steps + cells;
        sums = middles + cells;
    }

    RoundedRows(int64_t num_rows, int64_t groups)
        : RoundedRows(num_rows, groups, scratch(num_bytes(num_rows, groups), 1)) {}

    // The same rows from this one on.
    RoundedRows from(int64_t row) const {
        RoundedRows result = *this;
        const Rounded begin = tile(row);
        result.quads = const_cast<int32_t*>(begin.quads);
        result.corrections = const_cast<int32_t*>(begin.corrections);
        result.steps = const_cast<float*>(begin.steps);
        result.middles = const_cast<float*>(begin.middles);
        result.sums = const_cast<float*>(begin.sums);
        return result;
    }

    Rounded tile(int64_t row) const {
        const int64_t cell = row * num_groups;
        return {quads + cell * kQuads * Kind::kWords, corrections + cell * kSets * Kind::kSums, steps + cell,
                middles + cell, sums + cell * kSets};
    }
};

struct Scale {
    float step, middle;
};

// Rounds 32 values to integers of at most `limit`. NaN and infinity pass into the step.
template <class Integer>
ALWAYS_INLINE Scale round_group(const float* x, Integer* to, float limit, bool centered) {
    Vec low = load(x), high = low;
    IntVec largest = {};  // as bits: NaN is above infinity, which is above every number
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; i += kWidth) {
        const Vec value = load(x + i);
        IntVec bits;
        std::memcpy(&bits, &value, sizeof bits);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
        low = value < low ? value : low;
        high = value > high ? value : high;
    }
    float least = low[0], most = high[0];
    int32_t top = largest[0];
    for (int i = 1; i < kWidth; i++) {
        least = low[i] < least ? low[i] : least;
        most = high[i] > most ? high[i] : most;
        top = largest[i] > top ? largest[i] : top;
    }
    centered = centered && top < 0x7e800000;
    const float middle = centered ? (least + most) * 0.5f : 0.0f;
    const float reach = centered ? (most - least) * 0.5f : from_bits(uint32_t(top));
    const float factor = reach > 1e-30f ? limit / reach : 0.0f;
    for (int i = 0; i < kGroup; i++)  // the sum rounds to the nearest integer, which is then in the low bits
        to[i] = Integer(to_bits((x[i] - middle) * factor + 0x1.8p+23f));
    return {reach / limit, middle};
}

// Row r of a tile of `height` rows that begins at row `first`.
template <class Kind>
struct Place {
    const RoundedRows<Kind>& rows;
    int64_t first, height, r;

    template <class Integer>
    void put(int64_t g, const Integer* codes, Scale scale) const {
        constexpr int64_t kSets = RoundedRows<Kind>::kSets, count = kGroup / kSets;
        constexpr int32_t kOffset = Kind::Format::kOffset;
        const int64_t group = first * rows.num_groups + g * height;
        int32_t* words = rows.quads + group * kQuads * Kind::kWords + r * Kind::kWords;
        int32_t split[kQuads * Kind::kWords];
        split_quads(codes, split);
        for (int64_t quad = 0; quad < kQuads; quad++)
            std::memcpy(words + quad * height * Kind::kWords, split + quad * Kind::kWords,
                        Kind::kWords * sizeof *split);
        rows.steps[group + r] = scale.step;
        rows.middles[group + r] = scale.middle;
        for (int64_t set = 0; set < kSets; set++) {
            int32_t sum = 0, low = 0;
            for (int64_t i = 0; i < count; i++) sum += codes[set * count + i];
            if (Kind::kSums == 2)
                for (int64_t i = 0; i < count; i++) low += int8_t(codes[set * count + i]);
            rows.sums[group * kSets + set * height + r] = fma(scale.step, float(sum), scale.middle * float(count));
            int32_t* corrections = rows.corrections + (group * kSets + set * height + r) * Kind::kSums;
            corrections[0] = -kOffset * (Kind::kSums == 2 ? (sum - low) / 256 : sum);
            if (Kind::kSums == 2) corrections[1] = -kOffset * low;
        }
    }

    // The words of eight quads.
    template <class Integer>
    static void split_quads(const Integer* codes, int32_t* words) {
        if constexpr (Kind::kWords == 1) {
            std::memcpy(words, codes, kGroup);
        } else if constexpr (Kind::kPairs) {  // as the even and the odd bytes of four codes
#if defined(__AVX2__)
            int16_t wide[kGroup];
            for (int64_t i = 0; i < kGroup; i++) wide[i] = codes[i];
            for (int64_t i = 0; i < kGroup; i += 16) {
                __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(wide + i));
                some = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(some, 0xd8), 0xd8);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + i / 2), some);
            }
#endif
        } else {
            int8_t bytes[kQuads][2][4];  // high ones, low ones
            for (int64_t i = 0; i < kGroup; i++) {
                bytes[i / 4][1][i % 4] = int8_t(codes[i]);
                bytes[i / 4][0][i % 4] = int8_t((codes[i] - int8_t(codes[i])) >> 8);
            }
            std::memcpy(words, bytes, sizeof bytes);
        }
    }
};

template <int XBits>
struct Rounding;
template <>
struct Rounding<8> {
    using Type = int8_t;
    static constexpr float kLimit = 127.0f;
};
template <>
struct Rounding<16> {
    using Type = int16_t;
    static constexpr float kLimit = 127.0f * 256.0f;  // so that the high byte of the rounded half fits as well
};

// Rounds x, of width ≤ 32 · groups values, into the row at `place`. A group padded with zeros is centered on zero, so
// that the padding stays zero.
template <class Kind>
inline void round_row(const float* x, int64_t width, const Place<Kind>& place) {
    using To = Rounding<Kind::kXBits>;
    for (int64_t g = 0; g < place.rows.num_groups; g++) {
        alignas(64) float filled[kGroup];
        alignas(64) typename To::Type codes[kGroup];
        const bool whole = (g + 1) * kGroup <= width;
        if (!whole)
            for (int64_t i = 0; i < kGroup; i++) filled[i] = g * kGroup + i < width ? x[g * kGroup + i] : 0.0f;
        const Scale scale = round_group(whole ? x + g * kGroup : filled, codes, To::kLimit, whole && Kind::kXBits == 8);
        place.put(g, codes, scale);
    }
}

// Writes a row of ones: its products are the sums of the codes.
template <class Kind>
inline void put_ones(const Place<Kind>& place) {
    int8_t ones[kGroup];
    for (int i = 0; i < kGroup; i++) ones[i] = 1;
    for (int64_t g = 0; g < place.rows.num_groups; g++) place.put(g, ones, {0.0f, 0.0f});
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
