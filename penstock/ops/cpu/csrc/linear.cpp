#include "panels.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

template <class T>
void multiply(const Input& input, const Epilogue& epilogue, const T* weights) {
    const PanelItems items(input.num_rows, input.width, epilogue);
    const int64_t together = epilogue.gated ? 1 : kDenseTogether;
    const int64_t work = min(input.num_rows, items.block_rows) * input.width * kLanes * together / 4;
    parallel_for(items.count(), work, [&](int64_t item) { items.multiply(input, epilogue, weights, item); });
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(linear)(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, const void* panels, int32_t type,
               int64_t num_out, const float* bias, const float* residual, int64_t residual_stride, int32_t activation,
               int32_t gated, float* out, int64_t out_stride) {
    using namespace penstock::PENSTOCK_PATH;
    const Input input = {x, x_stride, num_rows, width};
    const Epilogue epilogue = {bias, residual, residual_stride, activation, gated, num_out, out, out_stride};
    return with_type(type, [&](auto* typed) {
        multiply(input, epilogue, static_cast<decltype(typed)>(const_cast<void*>(panels)));
        return kDone;
    });
}

EXPORT(linear)
