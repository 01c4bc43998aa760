#include "dense.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

constexpr int64_t kBlockBytes = 512 * 1024;     // of x: a block stays in the L2 cache while panels stream by
constexpr int kTogether = kParts == 1 ? 2 : 1;  // panels per tile: enough accumulators to hide the latency of fma
constexpr int64_t kWideRows = 16;               // from this many rows on a widened copy of a panel pays

// Reads weights in place, or for many rows from a float32 copy in scratch memory.
template <int N, class T>
inline void multiply_rows(const Input& input, const Epilogue& epilogue, int64_t row, int64_t end, int64_t panel,
                          const T* const (&panels)[N]) {
    if constexpr (sizeof(T) == sizeof(float)) {
        multiply_dense(input, epilogue, row, end, panel, panels);
    } else if (end - row < kWideRows) {
        multiply_dense(input, epilogue, row, end, panel, panels);
    } else {
        const int64_t size = input.width * kLanes;
        float* wide = static_cast<float*>(scratch(N * size * sizeof(float)));
        const float* widened[N];
        for (int n = 0; n < N; n++) {
            widened[n] = wide + n * size;
            for (int64_t i = 0; i < size; i += kLanes) {
                Vec group[kParts];
                load_group(panels[n] + i, group);
                std::memcpy(wide + n * size + i, group, sizeof group);
            }
        }
        multiply_dense(input, epilogue, row, end, panel, widened);
    }
}

// One product, cut into work items: blocks of rows by a few panels.
template <class T>
struct Product {
    Input input;
    Epilogue epilogue;
    const T* weights;
    int64_t size, num_panels, together, num_columns, block_rows, num_items;

    Product(const Input& input, const Epilogue& epilogue, const T* weights)
        : input(input), epilogue(epilogue), weights(weights), size(input.width * kLanes),
          num_panels(epilogue.num_panels()), together(epilogue.gated ? 1 : kTogether),
          num_columns(ceil_div(num_panels, together)) {
        const int64_t fitting = kBlockBytes / (max(input.width, 1) * int64_t(sizeof(float)));
        block_rows = max(fitting / kAccumulators, 4) * kAccumulators;
        num_items = ceil_div(input.num_rows, block_rows) * num_columns;
    }

    int64_t work() const { return min(input.num_rows, block_rows) * size * together / 4; }

    void run(int64_t item) const {
        const int64_t row = item / num_columns * block_rows, end = min(row + block_rows, input.num_rows);
        const int64_t panel = item % num_columns * together;
        const T* const first = weights + panel * size;
        if (epilogue.gated) {
            const T* const both[2] = {first, first + num_panels * size};
            multiply_rows(input, epilogue, row, end, panel, both);
        } else if (panel + kTogether <= num_panels) {
            const T* several[kTogether];
            for (int n = 0; n < kTogether; n++) several[n] = first + n * size;
            multiply_rows(input, epilogue, row, end, panel, several);
        } else {
            const T* const one[1] = {first};
            multiply_rows(input, epilogue, row, end, panel, one);
        }
    }
};

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
        using Stored = typename Pointee<decltype(typed)>::Type;
        const Product<Stored> product(input, epilogue, static_cast<const Stored*>(panels));
        parallel_for(product.num_items, product.work(), [&](int64_t item) { product.run(item); });
        return kDone;
    });
}

// Head h of every row times its own panels. Strides count elements: from row to row and from head to head.
KERNEL(head_linear)(const float* x, int64_t x_stride, int64_t head_stride, int64_t num_rows, int64_t num_heads,
                    int64_t width, const void* panels, int32_t type, int64_t num_out, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    return with_type(type, [&](auto* typed) {
        using Stored = typename Pointee<decltype(typed)>::Type;
        const int64_t size = ceil_div(num_out, kLanes) * kLanes * width;  // of a head's weights
        const auto product_of = [&](int64_t h) {
            const Input input = {x + h * head_stride, x_stride, num_rows, width};
            const Epilogue epilogue = {
                nullptr, nullptr, 0, kNoActivation, 0, num_out, out + h * num_out, num_heads * num_out};
            return Product<Stored>(input, epilogue, static_cast<const Stored*>(panels) + h * size);
        };
        const Product<Stored> first = product_of(0);
        parallel_for(num_heads * first.num_items, first.work(),
                     [&](int64_t item) { product_of(item / first.num_items).run(item % first.num_items); });
        return kDone;
    });
}

EXPORT(linear)
EXPORT(head_linear)
