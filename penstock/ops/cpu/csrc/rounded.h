// Activations rounded to 8 bits: for every row and every 32 of its values a scale and the integers −127 … 127. Where
// that is too coarse a second term, again of 8 bits, holds what the first one left over; it is a row of its own until
// the sums of both are added.
#pragma once

#include "packed.h"
#include "tiles.h"

namespace penstock {
namespace PENSTOCK_PATH {

// R rows of activations, value by value beside each other: entry [group][…][row].
struct Rounded {
    const int32_t* quads;               // [group][quad][row]: four int8 each
    const float* scales;                // [group][row]
    const float* sums;                  // [group][set][row]: scale · sum of the integers; for minimums
    const int32_t* corrections;         // [group][set][row]: −offset · sum of the integers
};

// Where the rows of a call are kept; a tile of rows lies in one piece.
struct RoundedRows {
    int64_t num_groups, sets;
    int32_t* quads;
    float *scales, *sums;
    int32_t* corrections;

    RoundedRows(int64_t num_rows, int64_t groups, int64_t num_sets) : num_groups(groups), sets(num_sets) {
        const int64_t cells = num_rows * groups;
        quads = static_cast<int32_t*>(scratch(cells * (kQuads + 1 + 2 * sets) * sizeof(int32_t), 1));
        scales = reinterpret_cast<float*>(quads + cells * kQuads);
        sums = scales + cells;
        corrections = reinterpret_cast<int32_t*>(sums + cells * sets);
    }

    Rounded tile(int64_t row) const {
        const int64_t cell = row * num_groups;
        return {quads + cell * kQuads, scales + cell, sums + cell * sets, corrections + cell * sets};
    }
};

// 32 values to integers; the return value is the scale. NaN and infinity show in the scale.
inline float round_group(const float* x, int8_t* to) {
    int32_t largest = 0;                // as bits: NaN is above infinity, which is above every number
    for (int i = 0; i < kGroup; i++) {
        const int32_t bits = int32_t(to_bits(x[i]) & 0x7fffffff);
        largest = bits > largest ? bits : largest;
    }
    const float top = from_bits(uint32_t(largest));
    const float factor = top > 1e-30f ? 127.0f / top : 0.0f;
    for (int i = 0; i < kGroup; i++)    // the sum rounds to the nearest integer, which is then in the low bits
        to[i] = int8_t(to_bits(x[i] * factor + 0x1.8p+23f));
    return top / 127.0f;
}

// Rows `first` to `first + height` of all terms' rows lie together; this is row r of them, group g.
struct Place {
    const RoundedRows& rows;
    int64_t first, height, r;

    void put(int64_t g, const int8_t* codes, float scale, int32_t offset) const {
        const Rounded tile = rows.tile(first);
        int32_t words[kQuads];
        std::memcpy(words, codes, sizeof words);
        int32_t* quads = const_cast<int32_t*>(tile.quads) + g * kQuads * height + r;
        for (int64_t quad = 0; quad < kQuads; quad++) quads[quad * height] = words[quad];
        const_cast<float*>(tile.scales)[g * height + r] = scale;
        for (int64_t set = 0; set < rows.sets; set++) {
            const int64_t count = kGroup / rows.sets, at = (g * rows.sets + set) * height + r;
            int32_t sum = 0;
            for (int64_t i = 0; i < count; i++) sum += codes[set * count + i];
            const_cast<float*>(tile.sums)[at] = scale * float(sum);
            const_cast<int32_t*>(tile.corrections)[at] = -offset * sum;
        }
    }
};

// x of width ≤ 32 · groups values becomes the rows from `place` on, one per term.
inline void round_row(const float* x, int64_t width, Place place, int terms, int32_t offset) {
    for (int64_t g = 0; g < place.rows.num_groups; g++) {
        alignas(64) float values[kGroup];
        alignas(64) int8_t codes[kGroup];
        for (int64_t i = 0; i < kGroup; i++) values[i] = g * kGroup + i < width ? x[g * kGroup + i] : 0.0f;
        const float scale = round_group(values, codes);
        place.put(g, codes, scale, offset);
        if (terms == 1) continue;
        for (int64_t i = 0; i < kGroup; i++) values[i] = fused(-scale, float(codes[i]), values[i]);
        const float rest = round_group(values, codes);
        Place{place.rows, place.first, place.height, place.r + 1}.put(g, codes, rest, offset);
    }
}

}  // namespace PENSTOCK_PATH
}  // namespace penstock
