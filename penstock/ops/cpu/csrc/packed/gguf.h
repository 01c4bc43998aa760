// Reads GGUF's quantized blocks: the codes of every 32 values, and the scale fields of every 16 or 32.
// The layouts of the bytes are described in quant/gguf.py.
#pragma once

#include <cstdint>
#include <cstring>

namespace penstock {
namespace gguf {

struct Group {
    uint8_t codes[32];
    uint16_t scale, minimum;        // float16, where a group has its own
    int8_t scales[2], minimums[2];  // integers, where it has a super-scale; one or two sets
};

struct Super {
    uint16_t scale, minimum;  // float16
};

inline uint16_t half_at(const uint8_t* from) { return uint16_t(from[0] | from[1] << 8); }

inline void read_nibbles(const uint8_t* from, Group& group) {
    for (int i = 0; i < 16; i++) {
        group.codes[i] = from[i] & 15;
        group.codes[i + 16] = from[i] >> 4;
    }
}

inline void read_fifth_bits(const uint8_t* from, Group& group) {
    uint32_t bits;
    std::memcpy(&bits, from, sizeof bits);
    for (int i = 0; i < 32; i++) group.codes[i] |= uint8_t((bits >> i & 1) << 4);
}

// Scales and minimums of Q4_K and Q5_K: 6 bits each in 12 bytes.
inline void read_six_bits(const uint8_t* from, Group* groups) {
    for (int g = 0; g < 8; g++) {
        const int k = g % 4;
        const uint8_t low = g < 4 ? from[k] & 63 : (from[8 + k] & 15) | (from[k] >> 2 & 48);
        const uint8_t min = g < 4 ? from[4 + k] & 63 : (from[8 + k] >> 4) | (from[4 + k] >> 2 & 48);
        groups[g].scales[0] = int8_t(low);
        groups[g].minimums[0] = int8_t(min);
    }
}

struct Q4_0 {
    static constexpr int kGroups = 1, kBytes = 18;
    static void read(const uint8_t* from, Group* groups, Super&) {
        groups->scale = half_at(from);
        read_nibbles(from + 2, *groups);
    }
};

struct Q4_1 {
    static constexpr int kGroups = 1, kBytes = 20;
    static void read(const uint8_t* from, Group* groups, Super&) {
        groups->scale = half_at(from);
        groups->minimum = half_at(from + 2);
        read_nibbles(from + 4, *groups);
    }
};

struct Q5_0 {
    static constexpr int kGroups = 1, kBytes = 22;
    static void read(const uint8_t* from, Group* groups, Super&) {
        groups->scale = half_at(from);
        read_nibbles(from + 6, *groups);
        read_fifth_bits(from + 2, *groups);
    }
};

struct Q5_1 {
    static constexpr int kGroups = 1, kBytes = 24;
    static void read(const uint8_t* from, Group* groups, Super&) {
        groups->scale = half_at(from);
        groups->minimum = half_at(from + 2);
        read_nibbles(from + 8, *groups);
        read_fifth_bits(from + 4, *groups);
    }
};

struct Q8_0 {
    static constexpr int kGroups = 1, kBytes = 34;
    static void read(const uint8_t* from, Group* groups, Super&) {
        groups->scale = half_at(from);
        for (int i = 0; i < 32; i++) groups->codes[i] = from[2 + i] ^ 128;
    }
};

struct Q2_K {
    static constexpr int kGroups = 8, kBytes = 84;
    static void read(const uint8_t* from, Group* groups, Super& super) {
        super = {half_at(from + 80), half_at(from + 82)};
        for (int g = 0; g < 8; g++) {
            for (int i = 0; i < 32; i++) groups[g].codes[i] = from[16 + g / 4 * 32 + i] >> (g % 4 * 2) & 3;
            for (int set = 0; set < 2; set++) {
                groups[g].scales[set] = int8_t(from[2 * g + set] & 15);
                groups[g].minimums[set] = int8_t(from[2 * g + set] >> 4);
            }
        }
    }
};

struct Q3_K {
    static constexpr int kGroups = 8, kBytes = 110;
    static void read(const uint8_t* from, Group* groups, Super& super) {
        super = {half_at(from + 108), 0};
        const uint8_t* packed = from + 96;
        for (int g = 0; g < 8; g++) {
            for (int i = 0; i < 32; i++) {
                const int low = from[32 + g / 4 * 32 + i] >> (g % 4 * 2) & 3;
                groups[g].codes[i] = uint8_t(low | (from[i] >> g & 1) << 2);
            }
            for (int set = 0; set < 2; set++) {
                const int k = 2 * g + set, low = packed[k % 8] >> (k / 8 * 4) & 15;
                groups[g].scales[set] = int8_t((low | (packed[8 + k % 4] >> (k / 4 * 2) & 3) << 4) - 32);
            }
        }
    }
};

struct Q4_K {
    static constexpr int kGroups = 8, kBytes = 144;
    static void read(const uint8_t* from, Group* groups, Super& super) {
        super = {half_at(from), half_at(from + 2)};
        read_six_bits(from + 4, groups);
        for (int g = 0; g < 8; g++)
            for (int i = 0; i < 32; i++) groups[g].codes[i] = from[16 + g / 2 * 32 + i] >> (g % 2 * 4) & 15;
    }
};

struct Q5_K {
    static constexpr int kGroups = 8, kBytes = 176;
    static void read(const uint8_t* from, Group* groups, Super& super) {
        super = {half_at(from), half_at(from + 2)};
        read_six_bits(from + 4, groups);
        for (int g = 0; g < 8; g++)
            for (int i = 0; i < 32; i++) {
                const int low = from[48 + g / 2 * 32 + i] >> (g % 2 * 4) & 15;
                groups[g].codes[i] = uint8_t(low | (from[16 + i] >> g & 1) << 4);
            }
    }
};

struct Q6_K {
    static constexpr int kGroups = 8, kBytes = 210;
    static void read(const uint8_t* from, Group* groups, Super& super) {
        super = {half_at(from + 208), 0};
        for (int g = 0; g < 8; g++) {
            const uint8_t *low = from + g / 4 * 64 + g % 2 * 32, *high = from + 128 + g / 4 * 32;
            for (int i = 0; i < 32; i++)
                groups[g].codes[i] = uint8_t((low[i] >> (g % 4 / 2 * 4) & 15) | (high[i] >> (g % 4 * 2) & 3) << 4);
            for (int set = 0; set < 2; set++) groups[g].scales[set] = int8_t(from[192 + 2 * g + set]);
        }
    }
};

// The exponent's scale must be one that float16 has: from 2^−24 to 2^15.
struct MXFP4 {
    static constexpr int kGroups = 1, kBytes = 17;
    static void read(const uint8_t* from, Group* groups, Super&) {
        const int exponent = int(from[0]) - 128;
        groups->scale = uint16_t(exponent >= -14 ? (exponent + 15) << 10 : 1 << (exponent + 24));
        read_nibbles(from + 1, *groups);
    }
};

struct IQ4_XS {
    static constexpr int kGroups = 8, kBytes = 136;
    static void read(const uint8_t* from, Group* groups, Super& super) {
        super = {half_at(from), 0};
        const int upper = half_at(from + 2);
        for (int g = 0; g < 8; g++) {
            read_nibbles(from + 8 + 16 * g, groups[g]);
            groups[g].scales[0] = int8_t(((from[4 + g / 2] >> (g % 2 * 4) & 15) | (upper >> (2 * g) & 3) << 4) - 32);
        }
    }
};

}  // namespace gguf
}  // namespace penstock
