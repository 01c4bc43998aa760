#include "experts/groups.h"
#include "packed/multiply.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

// The planes of one matrix of the stack.
template <class F>
Planes planes_of(const GroupedCall& call, const Planes& stack, int64_t matrix) {
    const Panel<F> first(stack, matrix * (call.num_stored() / kLanes));
    return {first.codes, first.high, first.scales, first.supers, stack.num_groups};
}

template <class Kind>
Call call_of(const GroupedCall& call, const RowGroups& groups, const Planes& stack, const RowList& list) {
    return {{nullptr, 0, list.count(), call.width},
            nullptr,
            0.0f,
            groups.epilogue(call, list),
            planes_of<typename Kind::Format>(call, stack, list.matrix)};
}

template <class Kind>
void multiply_rounded(const GroupedCall& call, const Planes& stack) {
    const int64_t num_places = call.num_rows + RowGroups::max_lists(call);  // with a row of ones for each list
    RowGroups groups(call, RoundedRows<Kind>::num_bytes(num_places, stack.num_groups));
    const RoundedRows<Kind> all(num_places, stack.num_groups, groups.extra);
    const auto is_few = [](const RowList& list) { return list.count() <= kMaxInPlace<Kind>; };
    const auto rows_of = [&](const RowList& list) { return all.from(list.begin + (&list - groups.lists)); };
    parallel_for(groups.num_sorted, call.width * 2, [&](int64_t place) {
        const RowList& list = groups.lists[groups.list_of[place]];
        const bool few = is_few(list);
        const int64_t row = place - list.begin, ones = few ? Direct<Kind, 1>::kOnes : 0;
        const Heights heights(list.count(), few ? kMaxInPlace<Kind> : kMaxHeight<Kind>);
        const int64_t tile = heights.tile(row), first = heights.first(tile), height = heights.rows(tile) + ones;
        const RoundedRows<Kind> rows = rows_of(list);
        round_row(call.row(groups.sorted[place]), call.width, Place<Kind>{rows, first, height, row - first});
        if (ones && row == 0) put_ones(Place<Kind>{rows, 0, height, list.count()});
    });
    groups.number_items([&](const RowList& list) {
        const Call one = call_of<Kind>(call, groups, stack, list);
        return is_few(list) ? num_few_items<Kind>(one) : Blocks<Kind>(list.count(), stack.num_groups).num_items(one);
    });
    const int64_t work = groups.num_sorted * stack.num_groups * kGroup * call.num_stored() / 8;
    groups.for_items(work, [&](const RowList& list, int64_t item) {
        const Call one = call_of<Kind>(call, groups, stack, list);
        const RoundedRows<Kind> rows = rows_of(list);
        if (is_few(list)) multiply_few(one, rows, item);
        else Blocks<Kind>(list.count(), stack.num_groups).multiply(one, rows, item);
    });
}

template <class F>
void multiply_float(const GroupedCall& call, const Planes& stack) {
    RowGroups groups(call, call.num_rows * call.width * sizeof(float));
    float* gathered = static_cast<float*>(groups.extra);
    groups.gather(call, gathered);
    groups.number_items([&](const RowList&) { return call.epilogue.num_panels(); });
    const int64_t work = groups.num_sorted * stack.num_groups * kGroup * call.num_stored();
    groups.for_items(work, [&](const RowList& list, int64_t panel) {
        Call one = call_of<Kind<F, 8>>(call, groups, stack, list);
        one.input = {gathered + list.begin * call.width, call.width, list.count(), call.width};
        multiply_widened<F>(one, panel);
    });
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(grouped_packed_matmul)(const float* x, int64_t x_stride, int64_t shared, int64_t width, const int32_t* ids,
                              int64_t num_rows, int64_t num_matrices, int32_t format, const uint8_t* codes,
                              const uint8_t* high, const uint8_t* scales, const uint8_t* supers, int32_t x_bits,
                              int64_t num_out, const float* bias, int64_t bias_stride, int32_t activation,
                              int32_t gated, float* out, int64_t out_stride) {
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
    const Planes stack = {codes, high, scales, supers, ceil_div(width, kGroup)};
    if (!call.is_valid()) return kBadIndex;
    return with_format(format, [&](auto kind) {
        using F = decltype(kind);
        if (x_bits == 0) multiply_float<F>(call, stack);
        else if (x_bits == 8) multiply_rounded<Kind<F, 8>>(call, stack);
        else return kBadIndex;
        return kDone;
    });
}

EXPORT(grouped_packed_matmul)
