// Exact products of codes and rounded activations: the registers of this path hold one quad of a panel.
#pragma once

#include "packed/rounded.h"

namespace penstock {
namespace PENSTOCK_PATH {

#if defined(__AVX512F__)
typedef __m512i Bytes;
typedef __m512i Words;
inline Bytes bytes_of(uint8_t value) { return _mm512_set1_epi8(char(value)); }
inline Bytes load_codes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Bytes shift_right(Bytes a, int count) { return _mm512_srli_epi16(a, count); }
inline Bytes shift_left(Bytes a, int count) { return _mm512_slli_epi16(a, count); }
inline Bytes select(Bytes table, Bytes index) { return _mm512_shuffle_epi8(table, index); }
template <class F>
inline Bytes level_table() {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kLevelCodes[F::kLevels])));
}
inline Vec to_float(Words a) { return _mm512_cvtepi32_ps(a); }
inline Words words_of(int32_t value) { return _mm512_set1_epi32(value); }
inline Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words shift_words(Words a, int count) { return _mm512_slli_epi32(a, count); }
inline Bytes add_bytes(Bytes a, Bytes b) { return _mm512_add_epi8(a, b); }
inline Words add_quads(Words a, Bytes codes) { return _mm512_dpbusd_epi32(a, codes, bytes_of(1)); }
#elif defined(__AVX2__)
typedef __m256i Bytes;
typedef __m256i Words;
inline Bytes bytes_of(uint8_t value) { return _mm256_set1_epi8(char(value)); }
inline Bytes load_codes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Bytes shift_right(Bytes a, int count) { return _mm256_srli_epi16(a, count); }
inline Bytes shift_left(Bytes a, int count) { return _mm256_slli_epi16(a, count); }
inline Bytes select(Bytes table, Bytes index) { return _mm256_shuffle_epi8(table, index); }
template <class F>
inline Bytes level_table() {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kLevelCodes[F::kLevels])));
}
inline Vec to_float(Words a) { return _mm256_cvtepi32_ps(a); }
inline Words words_of(int32_t value) { return _mm256_set1_epi32(value); }
inline Words add_words(Words a, Words b) { return _mm256_add_epi32(a, b); }
inline Words shift_words(Words a, int count) { return _mm256_slli_epi32(a, count); }
inline Bytes add_bytes(Bytes a, Bytes b) { return _mm256_add_epi8(a, b); }
inline Words add_quads(Words a, Bytes codes) {
    return add_words(a, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, bytes_of(1)), _mm256_set1_epi16(1)));
}
#else
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int32_t Words __attribute__((vector_size(16)));
inline Bytes bytes_of(uint8_t value) { return Bytes{} + value; }
inline Bytes load_codes(const uint8_t* from) {
    Bytes to;
    std::memcpy(&to, from, sizeof to);
    return to;
}
inline Bytes shift_right(Bytes a, int count) { return a >> count; }
inline Bytes shift_left(Bytes a, int count) { return a << count; }
template <class F>
inline Bytes level_table() {
    return load_codes(kLevelCodes[F::kLevels]);
}
inline Words words_of(int32_t value) { return Words{} + value; }
inline Words add_words(Words a, Words b) { return a + b; }
inline Words shift_words(Words a, int count) { return a << count; }
inline Bytes add_bytes(Bytes a, Bytes b) { return a + b; }
#if defined(PENSTOCK_NEON)
inline Bytes select(Bytes table, Bytes index) { return vqtbl1q_u8(table, index); }
inline Vec to_float(Words a) { return vcvtq_f32_s32(a); }
inline Words add_quads(Words a, Bytes codes) {
    return vreinterpretq_s32_u32(vpadalq_u16(vreinterpretq_u32_s32(a), vpaddlq_u8(codes)));
}
#else
inline Words add_quads(Words a, Bytes codes) {
    for (int i = 0; i < int(sizeof codes); i++) a[i / 4] += codes[i];
    return a;
}
inline Bytes select(Bytes table, Bytes index) {
    for (int i = 0; i < int(sizeof index); i++) index[i] = table[index[i]];
    return index;
}
inline Vec to_float(Words a) { return __builtin_convertvector(a, Vec); }
#endif
#endif

inline void store_codes(uint8_t* to, Bytes codes) { std::memcpy(to, &codes, sizeof codes); }

// Loads the codes of quads 2j and 2j + 1 of a group, from 4, 5, 6 or 8 bits.
template <class F>
ALWAYS_INLINE void load_pair(const Panel<F>& panel, int64_t group, int j, Bytes (&even)[kParts], Bytes (&odd)[kParts]) {
    const uint8_t* codes = panel.codes + group * F::kCodeBytes;
    const uint8_t* high = panel.high + group * F::kHighBytes;
    const Bytes low = bytes_of(15);
    for (int i = 0; i < kParts; i++) {
        const int64_t part = i * int64_t(sizeof(Bytes));
        if constexpr (F::kBits == 8) {
            even[i] = load_codes(codes + 2 * j * kQuadBytes + part);
            odd[i] = load_codes(codes + (2 * j + 1) * kQuadBytes + part);
        } else {
            const Bytes both = load_codes(codes + j * kQuadBytes + part);
            even[i] = both & low;
            odd[i] = shift_right(both, 4) & low;
        }
        if constexpr (F::kBits == 5) {
            const Bytes fifth = bytes_of(16), bits = load_codes(high + part);
            even[i] |= (2 * j <= 4 ? shift_left(bits, 4 - 2 * j) : shift_right(bits, 2 * j - 4)) & fifth;
            odd[i] |= (2 * j + 1 <= 4 ? shift_left(bits, 3 - 2 * j) : shift_right(bits, 2 * j - 3)) & fifth;
        }
        if constexpr (F::kBits == 6) {
            const Bytes upper = bytes_of(48), bits = load_codes(high + j / 2 * kQuadBytes + part);
            even[i] |= (j % 2 ? bits : shift_left(bits, 4)) & upper;
            odd[i] |= (j % 2 ? shift_right(bits, 2) : shift_left(bits, 2)) & upper;
        }
        if constexpr (F::kLevels != kNone) {
            even[i] = select(level_table<F>(), even[i]);
            odd[i] = select(level_table<F>(), odd[i]);
        }
    }
}

// Sums codes lane by lane: in bytes while the sums are sure to fit.
template <class F>
struct CodeSum {
    static constexpr bool kFitting = F::kCodeBits < 8;
    Bytes bytes[kParts];
    Words words[kParts];

    ALWAYS_INLINE void begin() {
#pragma GCC unroll 4
        for (int i = 0; i < kParts; i++) {
            bytes[i] = bytes_of(0);
            words[i] = words_of(-F::kOffset * int(kGroup) / F::kScales);
        }
    }
    ALWAYS_INLINE void add(int i, Bytes codes) {
        if constexpr (kFitting) bytes[i] = add_bytes(bytes[i], codes);
        else words[i] = add_quads(words[i], codes);
    }
    ALWAYS_INLINE Vec total(int i) const { return to_float(kFitting ? add_quads(words[i], bytes[i]) : words[i]); }
};

// Codes of `Bits` bits in quads [first, first + Count) of a group times the rows' activations, less the offset: the
// exact integer sums of R rows by N panels. load.pair(n, j, even, odd) gives the quads 2j and 2j + 1 of panel n.
#if defined(__AVX512F__)
template <int Bits, int Offset, int Count, int R, int N, class Load>
ALWAYS_INLINE void dot_quads(const int32_t* quads, const int32_t* corrections, int first, const Load& load,
                             Words (&total)[R][N][kParts]) {
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            total[r][n][0] = Offset ? _mm512_set1_epi32(corrections[r]) : _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = first / 2; j < (first + Count) / 2; j++) {
        Bytes even[N][1], odd[N][1];
        for (int n = 0; n < N; n++) load.pair(n, j, even[n], odd[n]);
        const int32_t *x = quads + 2 * j * R, *y = x + R;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                total[r][n][0] = _mm512_dpbusd_epi32(total[r][n][0], even[n][0], _mm512_set1_epi32(x[r]));
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                total[r][n][0] = _mm512_dpbusd_epi32(total[r][n][0], odd[n][0], _mm512_set1_epi32(y[r]));
    }
}
#elif defined(__AVX2__)
// One quad of every panel times R rows: added to sums of 16 bits, or the start of them.
template <int R, int N>
ALWAYS_INLINE void add_products(const Bytes (&codes)[N][kParts], const int32_t* x, bool start,
                                __m256i (&sums)[R][N][kParts]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const __m256i value = _mm256_set1_epi32(x[r]);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
#pragma GCC unroll 2
            for (int i = 0; i < kParts; i++) {
                const __m256i product = _mm256_maddubs_epi16(codes[n][i], value);
                sums[r][n][i] = start ? product : _mm256_add_epi16(sums[r][n][i], product);
            }
    }
}

// Products are summed in 16 bits as long as they are sure to fit, kRun pairs of quads, then widened.
template <int Bits, int Offset, int Count, int R, int N, class Load>
ALWAYS_INLINE void dot_quads(const int32_t* quads, const int32_t* corrections, int first, const Load& load,
                             Words (&total)[R][N][kParts]) {
    constexpr int kFitting = Bits == 4 ? 4 : Bits == 5 ? 2 : 1, kRun = kFitting < Count / 2 ? kFitting : Count / 2;
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
    for (int begin = first / 2; begin < (first + Count) / 2; begin += kRun) {
        __m256i sums[R][N][kParts];
#pragma GCC unroll 4
        for (int j = begin; j < begin + kRun; j++) {
            if constexpr (Load::kByQuad) {  // fewer registers hold codes than for a pair
#pragma GCC unroll 2
                for (int k = 0; k < 2; k++) {
                    Bytes codes[N][kParts];
                    for (int n = 0; n < N; n++) load.quad(n, 2 * j + k, codes[n]);
                    add_products(codes, quads + (2 * j + k) * R, j == begin && k == 0, sums);
                }
            } else {
                Bytes even[N][kParts], odd[N][kParts];
                for (int n = 0; n < N; n++) load.pair(n, j, even[n], odd[n]);
                add_products(even, quads + 2 * j * R, j == begin, sums);
                add_products(odd, quads + (2 * j + 1) * R, false, sums);
            }
        }
        const bool start = begin == first / 2;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
#pragma GCC unroll 2
                for (int i = 0; i < kParts; i++) {
                    const __m256i wide = _mm256_madd_epi16(sums[r][n][i], ones);
                    total[r][n][i] = !start   ? _mm256_add_epi32(total[r][n][i], wide)
                                     : Offset ? _mm256_add_epi32(_mm256_set1_epi32(corrections[r]), wide)
                                              : wide;
                }
    }
}

// The same with activations of 16 bits in pairs: the even bytes of a quad's codes and the odd ones.
template <int Offset, int Count, int R, int N, class Load>
ALWAYS_INLINE void dot_pairs(const int32_t* pairs, const int32_t* corrections, int first, const Load& load,
                             Words (&total)[R][N][kParts]) {
    const __m256i low = _mm256_set1_epi16(255);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
#pragma GCC unroll 2
            for (int i = 0; i < kParts; i++)
                total[r][n][i] = Offset ? _mm256_set1_epi32(corrections[r]) : _mm256_setzero_si256();
    const auto add = [&](const Bytes(&codes)[N][kParts], const int32_t* x) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            Bytes half[N][kParts];
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
#pragma GCC unroll 2
                for (int i = 0; i < kParts; i++) half[n][i] = k ? shift_right(codes[n][i], 8) : codes[n][i] & low;
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m256i value = _mm256_set1_epi32(x[2 * r + k]);
#pragma GCC unroll 4
                for (int n = 0; n < N; n++)
#pragma GCC unroll 2
                    for (int i = 0; i < kParts; i++)
                        total[r][n][i] = add_words(total[r][n][i], _mm256_madd_epi16(half[n][i], value));
            }
        }
    };
#pragma GCC unroll 4
    for (int j = first / 2; j < (first + Count) / 2; j++) {
        if constexpr (Load::kByQuad) {
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++) {
                Bytes codes[N][kParts];
                for (int n = 0; n < N; n++) load.quad(n, 2 * j + k, codes[n]);
                add(codes, pairs + (2 * j + k) * R * 2);
            }
        } else {
            Bytes even[N][kParts], odd[N][kParts];
            for (int n = 0; n < N; n++) load.pair(n, j, even[n], odd[n]);
            add(even, pairs + 2 * j * R * 2);
            add(odd, pairs + (2 * j + 1) * R * 2);
        }
    }
}
#elif defined(PENSTOCK_NEON)
// Panel after panel: the sums of one panel and the codes of a pair of quads fill the registers.
template <int Bits, int Offset, int Count, int R, int N, class Load>
ALWAYS_INLINE void dot_quads(const int32_t* quads, const int32_t* corrections, int first, const Load& load,
                             Words (&total)[R][N][kParts]) {
#pragma GCC unroll 2
    for (int n = 0; n < N; n++) {
        for (int r = 0; r < R; r++)
            for (int i = 0; i < kParts; i++) total[r][n][i] = vdupq_n_s32(Offset && Bits < 8 ? corrections[r] : 0);
#pragma GCC unroll 4
        for (int j = first / 2; j < (first + Count) / 2; j++) {
            Bytes codes[2][kParts];
            load.pair(n, j, codes[0], codes[1]);
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++) {
                if constexpr (Bits == 8)
                    for (int i = 0; i < kParts; i++) codes[k][i] ^= bytes_of(128);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const int8x16_t value = vreinterpretq_s8_s32(vdupq_n_s32(quads[(2 * j + k) * R + r]));
#pragma GCC unroll 4
                    for (int i = 0; i < kParts; i++)
                        total[r][n][i] = vdotq_s32(total[r][n][i], vreinterpretq_s8_u8(codes[k][i]), value);
                }
            }
        }
    }
}
#else
template <int Bits, int Offset, int Count, int R, int N, class Load>
ALWAYS_INLINE void dot_quads(const int32_t* quads, const int32_t* corrections, int first, const Load& load,
                             Words (&total)[R][N][kParts]) {
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            for (int i = 0; i < kParts; i++) total[r][n][i] = Words{} + (Offset && Bits < 8 ? corrections[r] : 0);
    for (int j = first / 2; j < (first + Count) / 2; j++) {
        Bytes codes[2][N][kParts];
        for (int n = 0; n < N; n++) load.pair(n, j, codes[0][n], codes[1][n]);
        for (int k = 0; k < 2; k++)
            for (int r = 0; r < R; r++) {
                const int32_t word = quads[(2 * j + k) * R + r];
                for (int n = 0; n < N; n++)
                    for (int i = 0; i < kParts; i++) {
                        const Bytes signs = Bits == 8 ? codes[k][n][i] ^ bytes_of(128) : codes[k][n][i];
                        for (int lane = 0; lane < 4; lane++)
                            for (int b = 0; b < 4; b++)
                                total[r][n][i][lane] += int8_t(signs[lane * 4 + b]) * int8_t(uint32_t(word) >> (8 * b));
                    }
            }
    }
}
#endif

}  // namespace PENSTOCK_PATH
}  // namespace penstock
