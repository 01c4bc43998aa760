#include "number.h"

KERNEL(embedding)(const int64_t* ids, int64_t num_ids, const void* panels, int32_t type, int64_t num_panels,
                  int64_t width, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    for (int64_t t = 0; t < num_ids; t++)
        if (ids[t] < 0 || ids[t] >= num_panels * kLanes) return kBadIndex;
    return with_type(type, [&](auto* typed) {
        const auto* stored = static_cast<decltype(typed)>(const_cast<void*>(panels));
        parallel_for(num_ids, width, [&](int64_t t) {
            const auto* from = stored + ids[t] / kLanes * width * kLanes + ids[t] % kLanes;
            for (int64_t c = 0; c < width; c++) out[t * width + c] = widen(from[c * kLanes]);
        });
        return kDone;
    });
}

EXPORT(embedding)
