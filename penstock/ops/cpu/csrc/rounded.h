// Activations rounded to 8 bits: every 32 values of a row become a scale times integers of −127 … 127 plus the middle of
// their range. Where that is too coarse a second term, again of 8 bits, holds what the first one left over; it is a row
// of its own until the sums of both are added.
#pragma once

#include "packed.h"
#include "tiles.h"

namespace penstock {
namespace PENSTOCK_PATH {

// Rows of activations, value by value beside each other: entry [group][…][row].
struct Rounded {
    const int32_t* quads;               // [group][quad][row]: four int8 each
    const int32_t* corrections;         // [group][set][row]: −offset · sum of the integers
    const float *scales, *middles;      // [group][row]
    const float* sums;                  // [group][set][row]: of the rounded values; for minimums
};

// Where the rows of a call are kept; a tile of rows lies in one piece.
struct RoundedRows {
    int64_t num_groups, sets;
    int32_t *quads, *corrections;
    float *scales, *middles, *sums;

    RoundedRows(int64_t num_rows, int64_t groups, int64_t num_sets) : num_groups(groups), sets(num_sets) {
        const int64_t cells = num_rows * groups;
        quads = static_cast<int32_t*>(scratch(cells * (kQuads + 2 + 2 * sets) * sizeof(int32_t), 1));
        corrections = quads + cells * kQuads;
        scales = reinterpret_cast<float*>(corrections + cells * sets);
        middles = scales + cells;
        sums = middles + cells;
    }

    Rounded tile(int64_t row) const {
        const int64_t cell = row * num_groups;
        return {quads + cell * kQuads, corrections + cell * sets, scales + cell, middles + cell, sums + cell * sets};
    }
};

struct Scale {
    float step, middle;
};

// 32 values to integers. NaN and infinity show in the step.
inline Scale round_group(const float* x, int8_t* to, bool centered) {
    int32_t largest = 0;                // as bits: NaN is above infinity, which is above every number
    float low = x[0], high = x[0];
    for (int i = 0; i < kGroup; i++) {
        const int32_t bits = int32_t(to_bits(x[i]) & 0x7fffffff);
        largest = bits > largest ? bits : largest;
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const float top = from_bits(uint32_t(largest));
    const float middle = centered && largest < 0x7e800000 ? (low + high) * 0.5f : 0.0f;
    const float reach = centered && largest < 0x7e800000 ? (high - low) * 0.5f : top;
    const float factor = reach > 1e-30f ? 127.0f / reach : 0.0f;
    for (int i = 0; i < kGroup; i++)    // the sum rounds to the nearest integer, which is then in the low bits
        to[i] = int8_t(to_bits((x[i] - middle) * factor + 0x1.8p+23f));
    return {reach / 127.0f, middle};
}

// Row r of a tile of `height` rows that begins at row `first`.
struct Place {
    const RoundedRows& rows;
    int64_t first, height, r;

    void put(int64_t g, const int8_t* codes, Scale scale, int32_t offset) const {
        const int64_t cell = first * rows.num_groups + g * height + r;
        int32_t words[kQuads];
        std::memcpy(words, codes, sizeof words);
        int32_t* quads = rows.quads + (first * rows.num_groups + g * height) * kQuads + r;
        for (int64_t quad = 0; quad < kQuads; quad++) quads[quad * height] = words[quad];
        rows.scales[cell] = scale.step;
        rows.middles[cell] = scale.middle;
        for (int64_t set = 0; set < rows.sets; set++) {
            const int64_t count = kGroup / rows.sets;
            const int64_t at = (first * rows.num_groups + g * height) * rows.sets + set * height + r;
            int32_t sum = 0;
            for (int64_t i = 0; i < count; i++) sum += codes[set * count + i];
            rows.sums[at] = fused(scale.step, float(sum), scale.middle * float(count));
            rows.corrections[at] = -offset * sum;
        }
    }
};

// x of width ≤ 32 · groups values becomes the rows from `place` on, one per term. A group that is filled up with zeros
// keeps them zero: its range is centered on zero.
inline void round_row(const float* x, int64_t width, const Place& place, int terms, int32_t offset) {
    for (int64_t g = 0; g < place.rows.num_groups; g++) {
        alignas(64) float values[kGroup];
        alignas(64) int8_t codes[kGroup];
        const bool whole = (g + 1) * kGroup <= width;
        for (int64_t i = 0; i < kGroup; i++) values[i] = g * kGroup + i < width ? x[g * kGroup + i] : 0.0f;
        const Scale scale = round_group(values, codes, whole);
        place.put(g, codes, scale, offset);
        if (terms == 1) continue;
        for (int64_t i = 0; i < kGroup; i++)
            values[i] = fused(-scale.step, float(codes[i]), values[i] - scale.middle);
        const Scale rest = round_group(values, codes, whole);
        Place{place.rows, place.first, place.height, place.r + 1}.put(g, codes, rest, offset);
    }
}

// A row of ones: its products are the sums of the codes.
inline void put_ones(const Place& place, int32_t offset) {
    int8_t ones[kGroup];
    for (int i = 0; i < kGroup; i++) ones[i] = 1;
    for (int64_t g = 0; g < place.rows.num_groups; g++) place.put(g, ones, {0.0f, 0.0f}, offset);
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
