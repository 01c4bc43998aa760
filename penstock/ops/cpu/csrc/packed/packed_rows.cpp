#include "packed/layout.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

template <class F>
void widen_row(const Planes& planes, int64_t row, int64_t width, float* out) {
    const Panel<F> panel(planes, row / kLanes);
    const int64_t lane = row % kLanes;
    for (int64_t g = 0; g < planes.num_groups; g++) {
        for (int set = 0; set < F::kScales; set++) {
            float scales[kLanes], more[kLanes] = {};
            read_scales(panel, g, set, scales, more);
            constexpr int64_t kCount = kGroup / F::kScales;
            const int64_t begin = set * kCount, end = min(begin + kCount, width - g * kGroup);
            for (int64_t i = begin; i < end; i++)
                out[g * kGroup + i] =
                    weight_of<F>(code_at(panel, g, i / 4, lane * 4 + i % 4), scales[lane], more[lane]);
        }
    }
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(packed_rows)(const int64_t* ids, int64_t num_ids, int32_t format, const uint8_t* codes, const uint8_t* high,
                    const uint8_t* scales, const uint8_t* supers, int64_t num_rows, int64_t width, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    const Planes planes = {codes, high, scales, supers, ceil_div(width, kGroup)};
    for (int64_t t = 0; t < num_ids; t++)
        if (ids[t] < 0 || ids[t] >= num_rows) return kBadIndex;
    return with_format(format, [&](auto kind) {
        parallel_for(num_ids, 4 * width,
                     [&](int64_t t) { widen_row<decltype(kind)>(planes, ids[t], width, out + t * width); });
        return kDone;
    });
}

EXPORT(packed_rows)
