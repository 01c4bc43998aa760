// Collectives of ranks that share memory. Sums are added in the order of ranks, so they are the same bits everywhere.
#include "runtime/mesh.h"

#include "simd.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

constexpr int64_t kPiece = 8192;  // values per work item

// Copies values [begin, end) of rows of `width` values, taken one after the other, between such rows and a slot.
template <bool IntoRows>
void copy_rows(float* rows, int64_t stride, int64_t width, int64_t begin, int64_t end, float* slot) {
    for (int64_t at = begin; at < end;) {
        const int64_t row = at / width, column = at % width, count = min(width - column, end - at);
        float *in_row = rows + row * stride + column, *in_slot = slot + (at - begin);
        std::memcpy(IntoRows ? in_row : in_slot, IntoRows ? in_slot : in_row, size_t(count) * sizeof(float));
        at += count;
    }
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

// Rank r gives x[T, widths[r]] → out[T, Σ widths].
KERNEL(mesh_gather)(void* mesh, const float* x, int64_t x_stride, int64_t num_rows, const int64_t* widths, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    using namespace penstock;
    auto* m = static_cast<Mesh*>(mesh);
    const int64_t size = mesh_size(m), own = num_rows * widths[mesh_rank(m)];
    const int64_t most = mesh_slot_bytes(m) / int64_t(sizeof(float));
    int64_t largest = 0, total = 0;
    for (int64_t r = 0; r < size; r++) {
        largest = PENSTOCK_PATH::max(largest, num_rows * widths[r]);
        total += widths[r];
    }
    for (int64_t begin = 0; begin < largest; begin += most) {
        auto* slot = reinterpret_cast<float*>(mesh_own_slot(m));
        const int64_t end = PENSTOCK_PATH::min(begin + most, own);
        copy_rows<false>(const_cast<float*>(x), x_stride, widths[mesh_rank(m)], begin, end, slot);
        if (const int32_t failed = mesh_meet(m)) return failed;
        for (int64_t r = 0, column = 0; r < size; column += widths[r++]) {
            auto* from = const_cast<float*>(reinterpret_cast<const float*>(mesh_slot(m, r)));
            copy_rows<true>(out + column, total, widths[r], begin,
                            PENSTOCK_PATH::min(begin + most, num_rows * widths[r]), from);
        }
    }
    return kDone;
}

// Every rank gives x[count] → out[count], the sum.
KERNEL(mesh_reduce)(void* mesh, const float* x, int64_t count, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    using namespace penstock;
    auto* m = static_cast<Mesh*>(mesh);
    const int64_t size = mesh_size(m), most = mesh_slot_bytes(m) / int64_t(sizeof(float));
    for (int64_t begin = 0; begin < count; begin += most) {
        const int64_t length = PENSTOCK_PATH::min(most, count - begin);
        std::memcpy(mesh_own_slot(m), x + begin, size_t(length) * sizeof(float));
        if (const int32_t failed = mesh_meet(m)) return failed;
        parallel_for(ceil_div(length, kPiece), size * kPiece, [&](int64_t piece) {
            const int64_t first = piece * kPiece, last = PENSTOCK_PATH::min(first + kPiece, length);
            float* sum = out + begin;
            const auto* slot = reinterpret_cast<const float*>(mesh_slot(m, 0));
            for (int64_t i = first; i < last; i++) sum[i] = slot[i];
            for (int64_t r = 1; r < size; r++) {
                slot = reinterpret_cast<const float*>(mesh_slot(m, r));
                for (int64_t i = first; i < last; i++) sum[i] += slot[i];
            }
        });
    }
    return kDone;
}

EXPORT(mesh_gather)
EXPORT(mesh_reduce)
