#include "attention/latent.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

constexpr int64_t kMaxRows = 64;             // query rows per work item, if there are enough
constexpr int64_t kMinChunks = 4;            // per piece of a span that is split along its positions
constexpr int64_t kMaxPartBytes = 64 << 20;  // of partials; a step that needs more is not split

struct LatentCall {
    const void* cache;
    int64_t stride, num_blocks, block_size;  // stride: elements from block to block
    int64_t rank, width;                     // numbers of a value, and of a key
    const float *q, *q_rope;                 // [T, H, rank] and [T, H, width - rank]
    int64_t num_heads;
    const int32_t* table;
    int64_t table_stride, table_width;
    const int32_t *query_start, *lengths;
    int64_t num_sequences;
    float scale;
    float* out;        // [T, H, rank]
    const Tail* tail;  // null: positions are places

    bool has_tree(int64_t sequence) const { return tail != nullptr && tail->begins[sequence] < lengths[sequence]; }
    int64_t position_of(int64_t sequence, int64_t token) const {
        return tail ? tail->positions[token] : lengths[sequence] - (query_start[sequence + 1] - token);
    }
    int64_t place_of(int64_t sequence, int64_t token, int64_t position) const {
        const int64_t begin = tail ? tail->begins[sequence] : position + 1;
        return position < begin ? position : begin + tail->nodes[token * tail->stride + position - begin];
    }
};

struct Span {  // rows [row, row + count) of one sequence, a row being token · H + head, and the chunks they see
    int64_t sequence, row, count;
    int64_t num_chunks, num_pieces;
    int64_t item;   // the first of its work items
    int64_t parts;  // floats before its partials, if it is split

    int64_t num_groups() const { return ceil_div(count, kLanes); }
};

struct Job {
    LatentCall call;
    int64_t rows;          // per span, at most
    int64_t piece_chunks;  // 0: no span is split
    Span* spans;
    int32_t* left;  // pieces not done yet, per span
    float* parts;
    int64_t num_spans, num_items, num_parts;  // num_parts: floats of all partials

    int64_t part_floats() const { return LatentRows::part_floats(call.rank); }
};

// Calls body(span) for every span, the last one first: it sees the most positions. The rows of a tree's token see a
// path of their own, so a span has no others.
template <class Body>
void each_span(const Job& job, const Body& body) {
    const LatentCall& call = job.call;
    for (int64_t s = call.num_sequences - 1; s >= 0; s--) {
        const int64_t from = call.query_start[s] * call.num_heads, to = call.query_start[s + 1] * call.num_heads;
        const int64_t together = call.has_tree(s) ? call.num_heads : to - from;
        for (int64_t end = to; end > from; end -= together) {
            const int64_t begin = end - together;
            for (int64_t n = ceil_div(together, job.rows) - 1; n >= 0; n--) {
                const int64_t row = begin + n * job.rows, count = min(job.rows, end - row);
                const int64_t last = call.position_of(s, (row + count - 1) / call.num_heads);
                body(Span{s, row, count, last / kChunk + 1, 1, 0, 0});
            }
        }
    }
}

void count_items(Job& job) {
    job.num_spans = job.num_items = job.num_parts = 0;
    each_span(job, [&](const Span& span) {
        const int64_t pieces = job.piece_chunks > 0 ? ceil_div(span.num_chunks, job.piece_chunks) : 1;
        job.num_spans++;
        job.num_items += pieces;
        if (pieces > 1) job.num_parts += span.num_groups() * span.num_chunks * job.part_floats();
    });
}

// Cuts the step into spans, and splits them along their positions when there are too few for the threads.
Job plan_job(const LatentCall& call) {
    Job job = {call, kMaxRows, 0, nullptr, nullptr, nullptr, 0, 0, 0};
    const int64_t enough = num_threads() > 1 ? 4 * num_threads() : 1;
    for (count_items(job); job.num_items < enough && job.rows > kLanes; count_items(job)) job.rows /= 2;
    if (job.num_items < enough) {
        int64_t total = 0;
        each_span(job, [&](const Span& span) { total += span.num_chunks; });
        job.piece_chunks = max(kMinChunks, ceil_div(total, 2 * enough));
        count_items(job);
        if (job.num_parts * int64_t(sizeof(float)) > kMaxPartBytes) {
            job.piece_chunks = 0;
            count_items(job);
        }
    }
    const int64_t bytes = ceil_div(job.num_spans * int64_t(sizeof(Span) + sizeof(int32_t)), 64) * 64;
    char* memory = static_cast<char*>(scratch(bytes + job.num_parts * sizeof(float), 1));
    job.spans = reinterpret_cast<Span*>(memory);
    job.left = reinterpret_cast<int32_t*>(job.spans + job.num_spans);
    job.parts = reinterpret_cast<float*>(memory + bytes);
    int64_t index = 0, item = 0, parts = 0;
    each_span(job, [&](Span span) {
        span.num_pieces = job.piece_chunks > 0 ? ceil_div(span.num_chunks, job.piece_chunks) : 1;
        span.item = item, span.parts = parts;
        item += span.num_pieces;
        if (span.num_pieces > 1) parts += span.num_groups() * span.num_chunks * job.part_floats();
        job.left[index] = int32_t(span.num_pieces);
        job.spans[index++] = span;
    });
    return job;
}

// Widens the latents of the positions [base, base + count) of the span into room[count][width].
template <class T>
bool widen_chunk(const LatentCall& call, const Span& span, int64_t base, int64_t count, float* room) {
    const int32_t* table = call.table + span.sequence * call.table_stride;
    const int64_t token = span.row / call.num_heads, width = call.width;
    for (int64_t j = 0; j < count; j++, room += width) {
        const int64_t place = call.place_of(span.sequence, token, base + j), index = place / call.block_size;
        const int64_t block = index < call.table_width ? table[index] : -1;
        if (block < 0 || block >= call.num_blocks) return false;
        const T* from = static_cast<const T*>(call.cache) + block * call.stride + place % call.block_size * width;
        int64_t d = 0;
        for (; d + kLanes <= width; d += kLanes) {
            Vec group[kParts];
            load_group(from + d, group);
            std::memcpy(room + d, group, sizeof group);
        }
        for (; d < width; d++) room[d] = widen(from[d]);
    }
    return true;
}

// Takes the queries of up to 16 rows; lanes beyond them repeat the last row, and are never written out.
void take_group(const LatentCall& call, const Span& span, int64_t first, LatentRows& rows) {
    const int64_t rope = call.width - call.rank;
    for (int64_t i = 0; i < kLanes; i++) {
        const int64_t row = span.row + min(first + i, span.count - 1);
        for (int64_t d = 0; d < call.rank; d++) rows.q[d * kLanes + i] = call.q[row * call.rank + d];
        for (int64_t d = 0; d < rope; d++) rows.q[(call.rank + d) * kLanes + i] = call.q_rope[row * rope + d];
        rows.last[i] = int32_t(call.position_of(span.sequence, row / call.num_heads));
    }
    rows.clear(call.rank);
}

template <class T>
bool attend_item(const Job& job, int64_t index, int64_t item) {
    const LatentCall& call = job.call;
    const Span& span = job.spans[index];
    const int64_t piece = item - span.item, groups = span.num_groups(),
                  floats = LatentRows::floats(call.rank, call.width);
    const int64_t room_floats = kChunk * (call.width + kLanes);
    float* room = static_cast<float*>(scratch((room_floats + groups * floats) * sizeof(float)));
    float* weights = room + kChunk * call.width;
    const auto group_at = [&](int64_t g) { return LatentRows(room + room_floats + g * floats, call.rank, call.width); };
    for (int64_t g = 0; g < groups; g++) {
        LatentRows rows = group_at(g);
        take_group(call, span, g * kLanes, rows);
    }
    const bool later = span.num_pieces > 1;
    const int64_t from = later ? piece * job.piece_chunks : 0;
    const int64_t to = later ? min(from + job.piece_chunks, span.num_chunks) : span.num_chunks;
    const int64_t end = call.position_of(span.sequence, (span.row + span.count - 1) / call.num_heads) + 1;
    const auto part_of = [&](int64_t c, int64_t g) {
        return job.parts + span.parts + (c * groups + g) * job.part_floats();
    };
    for (int64_t c = from; c < to; c++) {
        const int64_t base = c * kChunk, count = min(end - base, kChunk);
        if (!widen_chunk<T>(call, span, base, count, room)) return false;
        for (int64_t g = 0; g < groups; g++) {
            LatentRows rows = group_at(g);
            rows.attend(room, base, count, call.scale, weights, later ? part_of(c, g) : nullptr);
        }
    }
    if (later) {
        if (__atomic_sub_fetch(job.left + index, 1, __ATOMIC_ACQ_REL) != 0) return true;
        for (int64_t c = 0; c < span.num_chunks; c++)
            for (int64_t g = 0; g < groups; g++) group_at(g).merge(part_of(c, g), c * kChunk);
    }
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = g * kLanes;
        group_at(g).write(min(kLanes, span.count - first), call.out + (span.row + first) * call.rank);
    }
    return true;
}

template <class T>
int32_t attend_spans(const Job& job) {
    const int64_t work = kMaxRows * kChunk * job.call.width;
    int32_t result = kDone;
    parallel_for(job.num_items, work, [&](int64_t item) {
        int64_t low = 0, high = job.num_spans - 1;  // the last span that begins at this item or before
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (job.spans[middle].item <= item) low = middle;
            else high = middle - 1;
        }
        if (!attend_item<T>(job, low, item)) __atomic_store_n(&result, kBadIndex, __ATOMIC_RELAXED);
    });
    return result;
}

int32_t attend_step(const LatentCall& call, int32_t type) {
    for (int64_t s = 0; s < call.num_sequences; s++)
        if (call.lengths[s] < call.query_start[s + 1] - call.query_start[s]) return kBadIndex;
    if (call.tail && !is_tail_valid(*call.tail, call.query_start, call.lengths, call.num_sequences)) return kBadIndex;
    if (call.query_start[call.num_sequences] == 0) return kDone;
    const Job job = plan_job(call);
    return with_type(type, [&](auto* typed) {
        using Stored = typename Pointee<decltype(typed)>::Type;
        return attend_spans<Stored>(job);
    });
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

// `stride` counts elements from block to block.
KERNEL(latent_attention)(const float* q, const float* q_rope, void* cache, int64_t stride, int32_t type,
                         int64_t num_blocks, int64_t block_size, const int32_t* table, int64_t table_stride,
                         int64_t table_width, const int32_t* query_start, const int32_t* lengths, int64_t num_sequences,
                         int64_t num_heads, int64_t rank, int64_t width, float scale, const int32_t* begins,
                         const int64_t* positions, const int32_t* nodes, int64_t node_stride, int64_t num_nodes,
                         float* out) {
    using namespace penstock::PENSTOCK_PATH;
    const Tail tail = {begins, positions, nodes, node_stride, num_nodes};
    const LatentCall call = {
        cache,       stride,  num_blocks,    block_size, rank,         width,
        q,           q_rope,  num_heads,     table,      table_stride, table_width,
        query_start, lengths, num_sequences, scale,      out,          begins != nullptr ? &tail : nullptr};
    return attend_step(call, type);
}

EXPORT(latent_attention)
