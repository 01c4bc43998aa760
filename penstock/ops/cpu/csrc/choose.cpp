// Searches in a row of logits that choosing a token needs, without sorting it.
#include "elementary.h"
#include "norm.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

// Comparisons give -1 in each lane where they hold.
bool any(IntVec hits) {
    uint64_t words[sizeof(IntVec) / 8], all = 0;
    std::memcpy(words, &hits, sizeof words);
    for (uint64_t word : words) all |= word;
    return all != 0;
}

// Returns the largest value of a piece, -inf if it is empty; `damaged` becomes true if one is NaN.
float find_largest(const float* x, int64_t count, bool& damaged) {
    Vec tops[kParts];
    IntVec odd[kParts] = {};
    for (int n = 0; n < kParts; n++) tops[n] = broadcast(-__builtin_inff());
    int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes)
        for (int n = 0; n < kParts; n++) {
            const Vec values = load(x + c + n * kWidth);
            tops[n] = values > tops[n] ? values : tops[n];
            odd[n] |= values != values;
        }
    float lanes[kLanes];
    std::memcpy(lanes, tops, sizeof lanes);
    for (; c < count; c++) {
        lanes[0] = x[c] > lanes[0] ? x[c] : lanes[0];
        damaged |= x[c] != x[c];
    }
    for (int n = 0; n < kParts; n++) damaged |= any(odd[n]);
    for (int i = 1; i < kLanes; i++) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    return lanes[0];
}

// Finds the first of the largest values; a NaN counts as larger than any number.
int64_t find_first_largest(const float* x, int64_t width) {
    float top = -__builtin_inff();
    int64_t piece = 0;
    for (int64_t c = 0; c < width; c += kPiece) {
        bool damaged = false;
        const float value = find_largest(x + c, min(kPiece, width - c), damaged);
        if (damaged) {
            while (x[c] == x[c]) c++;
            return c;
        }
        if (value > top) top = value, piece = c;
    }
    while (x[piece] != top) piece++;
    return piece;
}

// True if any of 64 values is at or above `least`.
bool has_at_least(const float* x, Vec least) {
    IntVec hits = load(x) >= least;
    for (int i = kWidth; i < 64; i += kWidth) hits |= load(x + i) >= least;
    return any(hits);
}

// Writes how many values are at or above `least`, then the indices of the first `room` of them.
void list_above(const float* x, int64_t width, float least, int64_t room, int32_t* out) {
    int64_t count = 0;
    for (int64_t c = 0; c < width; c += 64) {
        const int64_t end = min(c + 64, width);
        if (end == c + 64 && !has_at_least(x + c, broadcast(least))) continue;
        for (int64_t i = c; i < end; i++)
            if (x[i] >= least) {
                if (count < room) out[1 + count] = int32_t(i);
                count++;
            }
    }
    out[0] = int32_t(count);
    for (int64_t i = count; i < room; i++) out[1 + i] = -1;
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(argmax)(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, int32_t* out) {
    using namespace penstock::PENSTOCK_PATH;
    parallel_for(num_rows, width,
                 [&](int64_t row) { out[row] = int32_t(find_first_largest(x + row * x_stride, width)); });
    return kDone;
}

KERNEL(above)(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, const float* least, int64_t room,
              int32_t* out) {
    using namespace penstock::PENSTOCK_PATH;
    parallel_for(num_rows, width,
                 [&](int64_t row) { list_above(x + row * x_stride, width, least[row], room, out + row * (1 + room)); });
    return kDone;
}

KERNEL(weight_sums)(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, const float* top,
                    const float* temperature, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    const int64_t pieces = ceil_div(width, kPiece);
    parallel_for(num_rows * pieces, 8 * min(kPiece, width), [&](int64_t item) {
        const int64_t row = item / pieces, begin = item % pieces * kPiece;
        const float most = top[row], heat = temperature[row];
        out[item] = sum_piece(x + row * x_stride + begin, min(kPiece, width - begin),
                              [=](float value) { return exponential((value - most) / heat); });
    });
    return kDone;
}

EXPORT(argmax)
EXPORT(above)
EXPORT(weight_sums)
