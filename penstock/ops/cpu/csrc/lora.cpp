// Low-rank additions to the rows of a product: y += scale · b · (a · x), with a and b by the row's slot.
#include "dense.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

// As LoraWeights.fill writes it. rank 0: no matrix here.
struct Record {
    const void *a, *b;  // panels [ceil(rank/16)][width][16] and [ceil(num_out/16)][rank][16]; embedding: a [V][rank]
    int64_t a_type, b_type, rank, first, num_out, scale;

    bool has_sums() const { return a != nullptr && b != nullptr; }  // otherwise one matrix: b · x, or a row of a
};
static_assert(sizeof(Record) == 8 * sizeof(int64_t), "a record is eight words");

// What a slot does to the outputs before anything is added: y += gain · (y - residual) + offset.
struct Shift {
    int64_t num_adapters;
    const float *gain, *offset;  // [num_out]; null together
};
static_assert(sizeof(Shift) == 3 * sizeof(int64_t), "a shift is three words");

constexpr int kChains = kParts == 1 ? 4 : kParts == 2 ? 2 : 1;  // of a sum over the width: its order, on this path
constexpr int kShrinkRows = kAccumulators / (kParts * kChains);
constexpr int kExpandRows = kAccumulators / kParts;
constexpr int64_t kRunRows = 48;      // neighbouring rows of one slot that are multiplied together
constexpr int64_t kGroupPanels = 16;  // of outputs, in one work item
constexpr int64_t kMaxGroups = 64;    // of one matrix

struct Table {
    const Record* records;
    const Shift* shifts;
    int64_t num_slots, num_adapters, num_parts;

    const Record* at(int64_t slot, int64_t adapter) const {
        return records + (slot * num_adapters + adapter) * num_parts;
    }
};

// Rows p of one token are p / per_token; of a stack of matrices each row has its own, whose slots follow each other.
struct RowSlots {
    const int32_t *tokens, *matrices;  // null: matrices 0, 1, … of each token
    int64_t per_token, num_matrices;

    int64_t operator[](int64_t row) const {
        const int64_t slot = tokens[row / per_token];
        const int64_t matrix = matrices == nullptr ? row % per_token : matrices[row];
        return slot < 0 || matrix < 0 ? -1 : slot * num_matrices + matrix;
    }
};

struct Rows {
    const float* x;  // or, for an embedding, ids
    const int64_t* ids;
    int64_t stride, shared, count, width;  // rows p of the result have row p / shared of x
    RowSlots slots;
    const float* residual;
    int64_t residual_stride, num_out;
    float* y;
    int64_t y_stride;

    const float* input(int64_t row) const { return x + row / shared * stride; }
};

// Rows [row, end) of one slot times one matrix; the sums of its ranks are at `inner`, [row][padded rank].
struct Task {
    const Record* record;
    int64_t row, end, inner;

    int64_t num_ranks() const { return record->has_sums() ? ceil_div(record->rank, kLanes) * kLanes : 0; }
    int64_t num_panels() const { return ceil_div(record->num_out, kLanes); }
    int64_t group() const { return max(kGroupPanels, ceil_div(num_panels(), kMaxGroups)); }
};

struct Item {
    int64_t task, panel;
};

template <int R, class T>
ALWAYS_INLINE void shrink_tile(const float* x, int64_t stride, int64_t width, const T* panel, float* out,
                               int64_t out_stride) {
    Vec sums[R][kChains][kParts] = {};
    int64_t c = 0;
    for (; c + kChains <= width; c += kChains)
#pragma GCC unroll 4
        for (int k = 0; k < kChains; k++) {
            Vec w[kParts];
            load_group(panel + (c + k) * kLanes, w);
            if constexpr (R <= 2) __builtin_prefetch(panel + (c + k + kAhead) * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
                for (int i = 0; i < kParts; i++)
                    sums[r][k][i] = fma(broadcast(x[r * stride + c + k]), w[i], sums[r][k][i]);
        }
    for (; c < width; c++) {
        Vec w[kParts];
        load_group(panel + c * kLanes, w);
        for (int r = 0; r < R; r++)
            for (int i = 0; i < kParts; i++) sums[r][0][i] = fma(broadcast(x[r * stride + c]), w[i], sums[r][0][i]);
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < kParts; i++) {
            for (int k = 1; k < kChains; k++) sums[r][0][i] = sums[r][0][i] + sums[r][k][i];
            store(out + r * out_stride + i * kWidth, sums[r][0][i]);
        }
}

// The sums of one panel of ranks for all rows of a task.
template <class T>
void shrink(const Rows& rows, const Task& task, int64_t panel, const T* a, float* inner) {
    const int64_t ranks = task.num_ranks();
    const Heights heights(task.end - task.row, kShrinkRows);
    for (int64_t tile = 0; tile < heights.num_tiles; tile++)
        with_count<kShrinkRows>(heights.rows(tile), [&](auto count) {
            const int64_t first = heights.first(tile);
            shrink_tile<decltype(count)::value>(rows.input(task.row + first), rows.stride, rows.width,
                                                a + panel * rows.width * kLanes,
                                                inner + task.inner + first * ranks + panel * kLanes, ranks);
        });
}

template <class T>
void look_up(const Rows& rows, const Task& task, const T* a, float* inner) {
    const int64_t ranks = task.num_ranks(), rank = task.record->rank;
    for (int64_t row = task.row; row < task.end; row++) {
        float* out = inner + task.inner + (row - task.row) * ranks;
        for (int64_t r = 0; r < rank; r++) out[r] = widen(a[rows.ids[row] * rank + r]);
    }
}

template <int R, class T>
ALWAYS_INLINE void expand_tile(const float* inner, int64_t stride, int64_t rank, const T* panel, float scale,
                               int64_t count, float* y, int64_t y_stride) {
    Vec sums[R][kParts] = {};
    for (int64_t k = 0; k < rank; k++) {
        Vec w[kParts];
        load_group(panel + k * kLanes, w);
        if constexpr (R <= 2) __builtin_prefetch(panel + (k + kAhead) * kLanes);
#pragma GCC unroll 24
        for (int r = 0; r < R; r++)
            for (int i = 0; i < kParts; i++) sums[r][i] = fma(broadcast(inner[r * stride + k]), w[i], sums[r][i]);
    }
    if (count == kLanes) {
#pragma GCC unroll 24
        for (int r = 0; r < R; r++)
            for (int i = 0; i < kParts; i++) {
                float* out = y + r * y_stride + i * kWidth;
                store(out, fma(broadcast(scale), sums[r][i], load(out)));
            }
        return;
    }
    for (int r = 0; r < R; r++) {
        float lanes[kLanes] = {};
        std::memcpy(lanes, y + r * y_stride, count * sizeof(float));
        for (int i = 0; i < kParts; i++)
            store(lanes + i * kWidth, fma(broadcast(scale), sums[r][i], load(lanes + i * kWidth)));
        std::memcpy(y + r * y_stride, lanes, count * sizeof(float));
    }
}

// Adds the outputs of some panels for all rows of a task.
template <class T>
void expand(const Rows& rows, const Task& task, int64_t begin, const T* b, const float* inner) {
    const Record& record = *task.record;
    const int64_t end = min(begin + task.group(), task.num_panels());
    const int64_t stride = record.has_sums() ? task.num_ranks() : rows.stride;
    const float* from = record.has_sums() ? inner + task.inner : rows.input(task.row);
    const float scale = from_bits(uint32_t(record.scale));
    const Heights heights(task.end - task.row, kExpandRows);
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t tile = 0; tile < heights.num_tiles; tile++)
            with_count<kExpandRows>(heights.rows(tile), [&](auto count) {
                const int64_t first = heights.first(tile);
                float* y = rows.y + (task.row + first) * rows.y_stride + record.first + panel * kLanes;
                expand_tile<decltype(count)::value>(from + first * stride, stride, record.rank,
                                                    b + panel * record.rank * kLanes, scale,
                                                    min(kLanes, record.num_out - panel * kLanes), y, rows.y_stride);
            });
}

// Adds the rows of an embedding that replaces the base's.
template <class T>
void add_rows(const Rows& rows, const Task& task, int64_t begin, const T* a) {
    const Record& record = *task.record;
    const int64_t first = begin * kLanes, end = min(first + task.group() * kLanes, record.num_out);
    const float scale = from_bits(uint32_t(record.scale));
    for (int64_t row = task.row; row < task.end; row++) {
        const T* from = a + rows.ids[row] * record.num_out;
        float* y = rows.y + row * rows.y_stride + record.first;
        for (int64_t o = first; o < end; o++) y[o] = y[o] + scale * widen(from[o]);
    }
}

template <class Body>
void with_stored(int64_t type, const void* data, const Body& body) {
    with_type(int32_t(type), [&](auto* typed) {
        body(static_cast<decltype(typed)>(const_cast<void*>(data)));
        return kDone;
    });
}

// Lists what the adapters at one place of their slots have to do, and counts the sums of ranks.
int64_t list_tasks(const Rows& rows, const Table& table, int64_t adapter, Task* tasks, int64_t& num_inner) {
    int64_t count = 0;
    num_inner = 0;
    const int64_t longest = rows.shared == 1 ? kRunRows : 1;
    for (int64_t row = 0, end; row < rows.count; row = end) {
        const int64_t slot = rows.slots[row];
        for (end = row + 1; end < rows.count && end - row < longest && rows.slots[end] == slot;) end++;
        if (slot < 0 || adapter >= table.shifts[slot].num_adapters) continue;
        for (int64_t part = 0; part < table.num_parts; part++) {
            const Record* record = table.at(slot, adapter) + part;
            if (record->rank == 0) continue;
            tasks[count] = {record, row, end, num_inner};
            num_inner += (end - row) * tasks[count++].num_ranks();
        }
    }
    return count;
}

int64_t count_shrinks(const Rows& rows, const Task& task) {
    return rows.ids != nullptr ? task.record->has_sums() : task.num_ranks() / kLanes;
}

int64_t align(int64_t size) { return ceil_div(size, 64) * 64; }

void add_adapter(const Rows& rows, const Table& table, int64_t adapter) {
    // Room for the tasks alone comes first: what they need beside it follows from them.
    const int64_t most = rows.count * table.num_parts;
    int64_t num_inner = 0;
    Task* tasks = static_cast<Task*>(scratch(align(most * sizeof(Task)), 1));
    const int64_t num_tasks = list_tasks(rows, table, adapter, tasks, num_inner);
    if (num_tasks == 0) return;
    int64_t num_shrinks = 0, num_expands = 0;
    for (int64_t t = 0; t < num_tasks; t++) {
        num_shrinks += count_shrinks(rows, tasks[t]);
        num_expands += ceil_div(tasks[t].num_panels(), tasks[t].group());
    }
    const int64_t begin = align(most * sizeof(Task)), items_bytes = align((num_shrinks + num_expands) * sizeof(Item));
    char* room = static_cast<char*>(scratch(begin + items_bytes + num_inner * sizeof(float), 1));
    tasks = reinterpret_cast<Task*>(room);
    list_tasks(rows, table, adapter, tasks, num_inner);  // the room may have moved
    Item *shrinks = reinterpret_cast<Item*>(room + begin), *expands = shrinks + num_shrinks;
    float* inner = reinterpret_cast<float*>(room + begin + items_bytes);
    int64_t s = 0, e = 0;
    for (int64_t t = 0; t < num_tasks; t++) {
        const int64_t panels = count_shrinks(rows, tasks[t]);
        for (int64_t panel = 0; panel < panels; panel++) shrinks[s++] = {t, panel};
        for (int64_t panel = 0; panel < tasks[t].num_panels(); panel += tasks[t].group()) expands[e++] = {t, panel};
    }
    const int64_t height = min(kRunRows, ceil_div(rows.count, num_tasks) + 1);
    parallel_for(num_shrinks, rows.ids != nullptr ? kLanes : height * rows.width * kLanes / 4, [&](int64_t i) {
        const Task& task = tasks[shrinks[i].task];
        with_stored(task.record->a_type, task.record->a, [&](auto* a) {
            if (rows.ids != nullptr) look_up(rows, task, a, inner);
            else shrink(rows, task, shrinks[i].panel, a, inner);
        });
    });
    parallel_for(num_expands, height * kGroupPanels * kLanes * tasks[0].record->rank / 4, [&](int64_t i) {
        const Task& task = tasks[expands[i].task];
        if (task.record->b == nullptr)
            return with_stored(task.record->a_type, task.record->a,
                               [&](auto* a) { add_rows(rows, task, expands[i].panel, a); });
        with_stored(task.record->b_type, task.record->b,
                    [&](auto* b) { expand(rows, task, expands[i].panel, b, inner); });
    });
}

// Moves the outputs of rows whose slots say so.
void shift(const Rows& rows, const Table& table) {
    parallel_for(rows.count, rows.num_out, [&](int64_t row) {
        const int64_t slot = rows.slots[row];
        if (slot < 0 || table.shifts[slot].gain == nullptr) return;
        const Shift& by = table.shifts[slot];
        const float* residual = rows.residual == nullptr ? nullptr : rows.residual + row * rows.residual_stride;
        float* y = rows.y + row * rows.y_stride;
        for (int64_t o = 0; o < rows.num_out; o++) {
            const float own = residual == nullptr ? y[o] : y[o] - residual[o];
            y[o] = (y[o] + by.gain[o] * own) + by.offset[o];
        }
    });
}

int32_t add_all(const Rows& rows, const Table& table) {
    int64_t most = 0;  // adapters of a slot
    bool shifts = false;
    for (int64_t row = 0; row < rows.count; row++) {
        const int64_t slot = rows.slots[row];
        if (slot >= table.num_slots) return kBadIndex;
        if (slot < 0) continue;
        most = max(most, table.shifts[slot].num_adapters);
        shifts |= table.shifts[slot].gain != nullptr;
    }
    if (shifts) shift(rows, table);
    for (int64_t adapter = 0; adapter < most; adapter++) add_adapter(rows, table, adapter);
    return kDone;
}

Table table_of(const int64_t* records, const int64_t* shifts, int64_t num_slots, int64_t num_adapters,
               int64_t num_parts) {
    return {reinterpret_cast<const Record*>(records), reinterpret_cast<const Shift*>(shifts), num_slots, num_adapters,
            num_parts};
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(add_lora)(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, const int32_t* slots,
                 const int64_t* records, const int64_t* shifts, int64_t num_slots, int64_t num_adapters,
                 int64_t num_parts, const float* residual, int64_t residual_stride, int64_t num_out, float* y,
                 int64_t y_stride) {
    using namespace penstock::PENSTOCK_PATH;
    const RowSlots own = {slots, nullptr, 1, 1};
    return add_all({x, nullptr, x_stride, 1, num_rows, width, own, residual, residual_stride, num_out, y, y_stride},
                   table_of(records, shifts, num_slots, num_adapters, num_parts));
}

KERNEL(add_grouped_lora)(const float* x, int64_t x_stride, int64_t shared, int64_t num_rows, int64_t width,
                         const int32_t* slots, const int32_t* matrices, int64_t per_token, int64_t num_matrices,
                         const int64_t* records, const int64_t* shifts, int64_t num_slots, int64_t num_adapters,
                         int64_t num_parts, int64_t num_out, float* y, int64_t y_stride) {
    using namespace penstock::PENSTOCK_PATH;
    const RowSlots own = {slots, matrices, per_token, num_matrices};
    return add_all({x, nullptr, x_stride, shared, num_rows, width, own, nullptr, 0, num_out, y, y_stride},
                   table_of(records, shifts, num_slots, num_adapters, num_parts));
}

KERNEL(add_lora_rows)(const int64_t* ids, int64_t num_rows, const int32_t* slots, const int64_t* records,
                      const int64_t* shifts, int64_t num_slots, int64_t num_adapters, int64_t num_parts,
                      int64_t num_out, float* y, int64_t y_stride) {
    using namespace penstock::PENSTOCK_PATH;
    const RowSlots own = {slots, nullptr, 1, 1};
    return add_all({nullptr, ids, 0, 1, num_rows, 0, own, nullptr, 0, num_out, y, y_stride},
                   table_of(records, shifts, num_slots, num_adapters, num_parts));
}

EXPORT(add_lora)
EXPORT(add_grouped_lora)
EXPORT(add_lora_rows)
