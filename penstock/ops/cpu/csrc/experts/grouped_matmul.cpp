#include "experts/groups.h"
#include "panels.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

template <class T>
void multiply_groups(const GroupedCall& call, const T* weights) {
    RowGroups groups(call, call.num_rows * call.width * sizeof(float));
    float* gathered = static_cast<float*>(groups.extra);
    groups.gather(call, gathered);
    groups.number_items(
        [&](const RowList& list) { return PanelItems(list.count(), call.width, call.epilogue).count(); });
    const int64_t size = call.num_stored() * call.width;  // of a matrix
    groups.for_items(groups.num_sorted * size / 4, [&](const RowList& list, int64_t item) {
        const Input input = {gathered + list.begin * call.width, call.width, list.count(), call.width};
        const Epilogue epilogue = groups.epilogue(call, list);
        PanelItems(list.count(), call.width, epilogue).multiply(input, epilogue, weights + list.matrix * size, item);
    });
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(grouped_matmul)(const float* x, int64_t x_stride, int64_t shared, int64_t width, const int32_t* ids,
                       int64_t num_rows, int64_t num_matrices, const void* panels, int32_t type, int64_t num_out,
                       const float* bias, int64_t bias_stride, int32_t activation, int32_t gated, float* out,
                       int64_t out_stride) {
    using namespace penstock::PENSTOCK_PATH;
    const GroupedCall call = {x,
                              x_stride,
                              shared,
                              width,
                              ids,
                              num_rows,
                              num_matrices,
                              bias_stride,
                              {bias, nullptr, 0, activation, gated, num_out, out, out_stride}};
    if (!call.is_valid()) return kBadIndex;
    return with_type(type, [&](auto* typed) {
        multiply_groups(call, static_cast<decltype(typed)>(const_cast<void*>(panels)));
        return kDone;
    });
}

EXPORT(grouped_matmul)
