#include "panels.h"

// Head h of every row times its own panels. Strides count elements: from row to row and from head to head.
KERNEL(head_linear)(const float* x, int64_t x_stride, int64_t head_stride, int64_t num_rows, int64_t num_heads,
                    int64_t width, const void* panels, int32_t type, int64_t num_out, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    return with_type(type, [&](auto* typed) {
        const auto* weights = static_cast<decltype(typed)>(const_cast<void*>(panels));
        Epilogue epilogue = {nullptr, nullptr, 0, kNoActivation, 0, num_out, out, num_heads * num_out};
        const PanelItems items(num_rows, width, epilogue);
        const int64_t size = epilogue.num_panels() * kLanes * width;  // of a head's weights
        const int64_t work = min(num_rows, items.block_rows) * width * kLanes * kDenseTogether / 4;
        parallel_for(num_heads * items.count(), work, [&, epilogue](int64_t item) {
            const int64_t h = item / items.count();
            Epilogue own = epilogue;
            own.out = out + h * num_out;
            items.multiply(Input{x + h * head_stride, x_stride, num_rows, width}, own, weights + h * size,
                           item % items.count());
        });
        return kDone;
    });
}

EXPORT(head_linear)
