// Rows sorted by the matrix that each names, inside the kernel, so that a tape can be replayed with other names.
#pragma once

#include "dense.h"

namespace penstock {
namespace PENSTOCK_PATH {

// A product of rows with a stack of equal matrices. Row p of the result is x[p / shared] times matrix ids[p].
struct GroupedCall {
    const float* x;
    int64_t x_stride, shared, width;
    const int32_t* ids;  // -1: the result is zero
    int64_t num_rows, num_matrices;
    int64_t bias_stride;  // from one matrix to the next
    Epilogue epilogue;    // of matrix 0

    const float* row(int64_t p) const { return x + p / shared * x_stride; }
    int64_t num_stored() const { return epilogue.gated ? 2 * epilogue.num_out : epilogue.num_out; }
    bool is_valid() const {
        for (int64_t p = 0; p < num_rows; p++)
            if (ids[p] < -1 || ids[p] >= num_matrices) return false;
        return num_stored() % kLanes == 0 && epilogue.num_out % kLanes == 0;
    }
};

// The rows [begin, end) of the sorted ones have one matrix.
struct RowList {
    int64_t matrix, begin, end, first_item;

    int64_t count() const { return end - begin; }
};

inline int64_t aligned(int64_t size) { return ceil_div(size, 64) * 64; }

// Sorts rows by matrix, and counts work items list by list. `extra` bytes follow in memory of the calling thread.
struct RowGroups {
    int64_t num_sorted = 0, num_lists = 0, num_items = 0;
    int32_t *sorted, *list_of;  // of each place: its row, its list
    RowList* lists;
    void* extra;

    static int64_t max_lists(const GroupedCall& call) { return min(call.num_rows, call.num_matrices); }

    RowGroups(const GroupedCall& call, size_t extra_bytes) {
        const int64_t rows_bytes = aligned(call.num_rows * sizeof(int32_t));
        const int64_t counts_bytes = aligned((call.num_matrices + 1) * sizeof(int64_t));
        const int64_t lists_bytes = aligned(max_lists(call) * sizeof(RowList));
        char* memory = static_cast<char*>(scratch(2 * rows_bytes + counts_bytes + lists_bytes + extra_bytes, 1));
        extra = memory + 2 * rows_bytes + counts_bytes + lists_bytes;
        sorted = reinterpret_cast<int32_t*>(memory);
        list_of = reinterpret_cast<int32_t*>(memory + rows_bytes);
        lists = reinterpret_cast<RowList*>(memory + 2 * rows_bytes);
        int64_t* next = reinterpret_cast<int64_t*>(memory + 2 * rows_bytes + lists_bytes);
        for (int64_t e = 0; e <= call.num_matrices; e++) next[e] = 0;
        for (int64_t p = 0; p < call.num_rows; p++) next[call.ids[p] + 1]++;
        num_sorted = call.num_rows - next[0];
        int64_t begin = 0;
        for (int64_t e = 0; e < call.num_matrices; e++) {
            const int64_t count = next[e + 1];
            next[e + 1] = begin;
            if (count == 0) continue;
            for (int64_t i = begin; i < begin + count; i++) list_of[i] = int32_t(num_lists);
            lists[num_lists++] = {e, begin, begin + count, 0};
            begin += count;
        }
        for (int64_t p = 0; p < call.num_rows; p++) {
            if (call.ids[p] >= 0) sorted[next[call.ids[p] + 1]++] = int32_t(p);
            else std::memset(call.epilogue.row(p), 0, call.epilogue.num_out * sizeof(float));
        }
    }

    // The epilogue of a list's matrix and rows.
    Epilogue epilogue(const GroupedCall& call, const RowList& list) const {
        Epilogue result = call.epilogue;
        if (result.bias != nullptr) result.bias += list.matrix * call.bias_stride;
        result.rows = sorted + list.begin;
        return result;
    }

    // Copies the rows of x in their order here → [num_sorted][width], at `to`.
    void gather(const GroupedCall& call, float* to) const {
        parallel_for(num_sorted, call.width, [&](int64_t i) {
            std::memcpy(to + i * call.width, call.row(sorted[i]), call.width * sizeof(float));
        });
    }

    // Numbers the items, `count(list)` of each list.
    template <class Count>
    void number_items(const Count& count) {
        for (int64_t l = 0; l < num_lists; l++) {
            lists[l].first_item = num_items;
            num_items += count(lists[l]);
        }
    }

    // Calls body(list, item of the list) for all items; `work` is that of all together.
    template <class Body>
    void for_items(int64_t work, const Body& body) const {
        if (num_items == 0) return;
        parallel_for(num_items, ceil_div(work, num_items), [&](int64_t item) {
            int64_t low = 0, high = num_lists;  // the last list that begins at or before the item
            while (high - low > 1) {
                const int64_t middle = (low + high) / 2;
                if (lists[middle].first_item <= item) low = middle;
                else high = middle;
            }
            body(lists[low], item - lists[low].first_item);
        });
    }
};

}  // namespace PENSTOCK_PATH
}  // namespace penstock
