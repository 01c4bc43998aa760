#include "attention/paged.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

constexpr int64_t kRows = 96;       // query rows per work item, if there are enough
constexpr int64_t kMinRows = 48;    // per work item, when items are made smaller to occupy all threads
constexpr int64_t kSplitRows = 12;  // up to this many, a span may be split along its keys and values
constexpr int64_t kMinChunks = 4;   // per piece of a split span
#if defined(__AVX2__)
constexpr int64_t kDirectRows = 48;  // up to this many, keys and values are widened as they are read, not in advance
#else
constexpr int64_t kDirectRows = kTileRows;
#endif

struct Span {  // query tokens of one sequence, and the chunks they see
    int32_t sequence, begin, end;
    int32_t first_chunk, num_chunks;
    int32_t num_pieces;  // work items per head
    int64_t item;        // the first of them
    int64_t parts;       // floats before its partials, if it is split
};

struct Job {
    Call call;
    int64_t tokens;  // per span, at most
    int64_t num_spans;
    int64_t total;         // chunks that each row sees, in all
    int64_t piece_chunks;  // such chunks per piece
    Span* spans;
    int32_t* left;  // pieces not done yet, per span and head
    float* parts;   // partials of the split spans
    int64_t num_items;
};

int64_t count_chunk_floats(const Call& call, int64_t count) { return 2 * Rows::pad(count) + count * call.size(); }

// Counts the floats of a split span's partials, of every head and chunk.
int64_t count_span_floats(const Call& call, const Span& span) {
    const int64_t count = (span.end - span.begin) * call.group();
    return span.num_pieces > 1 ? call.cache.num_heads * span.num_chunks * count_chunk_floats(call, count) : 0;
}

Partials find_partials(const Job& job, const Span& span, int64_t kv_head, int64_t chunk) {
    const int64_t count = (span.end - span.begin) * job.call.group();
    float* at = job.parts + span.parts + (kv_head * span.num_chunks + chunk) * count_chunk_floats(job.call, count);
    return {at, at + Rows::pad(count), at + 2 * Rows::pad(count)};
}

int64_t chunks_per_piece(const Job& job, const Span& span) {
    const int64_t count = (span.end - span.begin) * job.call.group();
    return count <= kSplitRows ? max(kMinChunks, ceil_div(job.piece_chunks, count)) : span.num_chunks;
}

// The positions that the queries [begin, end) of a sequence see: from `first` to `last`.
struct Range {
    int64_t first, last;
};

Range find_range(const Call& call, int64_t sequence, int64_t begin, int64_t end) {
    Range range = {call.first_of(sequence, begin), call.position_of(sequence, end - 1)};
    for (int64_t t = begin; call.tail && t < end; t++) {  // in a tree a later query may be at an earlier position
        range.first = min(range.first, call.first_of(sequence, t));
        range.last = max(range.last, call.position_of(sequence, t));
    }
    return range;
}

// Calls body(span) for every span, the last one first: it sees the most positions.
template <class Body>
void each_span(const Job& job, const Body& body) {
    const Call& call = job.call;
    for (int64_t s = call.num_sequences - 1; s >= 0; s--) {
        const int64_t from = call.query_start[s], to = call.query_start[s + 1];
        for (int64_t n = ceil_div(to - from, job.tokens) - 1; n >= 0; n--) {
            const int64_t begin = from + n * job.tokens, end = min(begin + job.tokens, to);
            const Range range = find_range(call, s, begin, end);
            const int64_t first = range.first / kChunk, last = range.last / kChunk;
            Span span = {int32_t(s), int32_t(begin), int32_t(end), int32_t(first), int32_t(last + 1 - first), 1, 0, 0};
            span.num_pieces = int32_t(ceil_div(span.num_chunks, chunks_per_piece(job, span)));
            body(span);
        }
    }
}

// Cuts the step into spans, and splits long spans with few rows when there are too few spans for the threads.
Job plan_job(const Call& call, int64_t tokens) {
    const int64_t num_heads = call.cache.num_heads;
    Job job = {call, tokens, 0, 0, 1, nullptr, nullptr, nullptr, 0};
    each_span(job, [&](const Span& span) {
        job.num_spans++;
        job.total += call.num_heads * (span.end - span.begin) * span.num_chunks;
    });
    job.piece_chunks = ceil_div(job.total, 8 * num_threads());
    int64_t parts = 0;
    each_span(job, [&](const Span& span) { parts += count_span_floats(call, span); });
    const int64_t bytes = ceil_div(job.num_spans * int64_t(sizeof(Span) + num_heads * sizeof(int32_t)), 64) * 64;
    char* memory = static_cast<char*>(scratch(bytes + parts * sizeof(float), 1));
    job.parts = reinterpret_cast<float*>(memory + bytes);
    job.spans = reinterpret_cast<Span*>(memory);
    job.left = reinterpret_cast<int32_t*>(job.spans + job.num_spans);
    int64_t index = 0;
    parts = 0;
    each_span(job, [&](Span span) {
        span.item = job.num_items, span.parts = parts;
        job.num_items += span.num_pieces * num_heads;
        parts += count_span_floats(call, span);
        for (int64_t h = 0; h < num_heads; h++) job.left[index * num_heads + h] = span.num_pieces;
        job.spans[index++] = span;
    });
    return job;
}

// Packs the span's queries and the positions they see, as rows of one key/value head.
void take_queries(const Call& call, const Span& span, int64_t kv_head, Rows& rows) {
    const int64_t group = call.group(), head = kv_head * group;
    rows.pack([&](int64_t i) {
        return call.q + (span.begin + i / group) * call.q_stride + (head + i % group) * rows.head_size;
    });
    for (int64_t i = 0; i < rows.count; i++) {
        rows.first[i] = int32_t(call.first_of(span.sequence, span.begin + i / group));
        rows.last[i] = int32_t(call.position_of(span.sequence, span.begin + i / group));
        rows.slope[i] = call.alibi != nullptr ? call.alibi[head + i % group] : 0.0f;
    }
}

void write_outputs(const Call& call, const Span& span, int64_t kv_head, const Rows& rows) {
    const int64_t group = call.group();
    for (int64_t i = 0; i < rows.count; i++) {
        const int64_t token = span.begin + i / group, head = kv_head * group + i % group;
        const float* sink = call.sinks == nullptr ? nullptr : call.sinks + head;
        write_output(rows, i, sink, call.out + (token * call.num_heads + head) * call.cache.head_size);
    }
}

// Bytes that attend_tail() needs beside the room of a chunk.
int64_t count_tail_bytes(const Call& call, int64_t count) {
    if (!call.tail) return 0;
    return Rows::bytes(call.group(), call.cache.head_size, call.size()) +
           count_chunk_floats(call, count) * int64_t(sizeof(float));
}

// Attends to the chunk at `base`, which holds nodes of a tree: each query by itself to its own path, laid out as a
// line.
template <class T>
bool attend_tail(const Call& call, const Span& span, int64_t kv_head, const Source<T>& source, const Range& range,
                 int64_t base, Rows& rows, float* room, char* memory, const Partials& parts) {
    const int64_t group = call.group(), begin = call.tail->begins[span.sequence];
    const int64_t least = max(range.first - base, 0), most = min(range.last + 1 - base, kChunk);
    Chunk<float> wide;
    if (!source.find_widened(base, least, min(most, begin - base), rows.size, room, wide)) return false;
    int64_t held[kChunk];  // nodes whose keys and values are in the room
    for (int64_t j = 0; j < kChunk; j++) held[j] = -1;
    for (int64_t t = 0; t < span.end - span.begin; t++) {
        const int64_t token = span.begin + t, row = t * group;
        const int32_t* nodes = call.tail->nodes + token * call.tail->stride;
        Rows one(group, rows.head_size, rows.size, memory);
        one.pack([&](int64_t i) { return call.q + token * call.q_stride + (kv_head * group + i) * rows.head_size; });
        for (int64_t i = 0; i < group; i++) {
            one.first[i] = rows.first[row + i], one.last[i] = rows.last[row + i];
            one.slope[i] = rows.slope[row + i];
        }
        one.set_visible(base);
        if (!one.can_see(0)) continue;
        for (int64_t j = max(begin - base, one.begin[0]); j < one.end[0]; j++) {
            const int64_t node = nodes[base + j - begin];
            if (held[j] != node && !source.widen_place(begin + node, j, rows.size, room)) return false;
            held[j] = node;
        }
        const Partials own = {parts.max + row, parts.sum + row, parts.values + row * rows.size};
        attend_chunk(one, wide, base, call.rule, &own);
    }
    return true;
}

// Attends to the chunks [from, to) of a span where they are stored, and prefetches the next one meanwhile; partials of
// a split span are stored for later.
template <class T>
bool attend_in_place(const Job& job, const Span& span, const Source<T>& source, const Range& range, int64_t from,
                     int64_t to, Rows& rows) {
    const Source<T> beside = {source.cache, source.table, source.table_width, source.head + 1};
    const bool later = span.num_pieces > 1;
    const bool more = !later && source.head + 1 < source.cache.num_heads;  // most likely this thread's next item
    Chunk<T> chunks[2];
    const auto find = [&](int64_t c, const Source<T>& where, Chunk<T>& chunk) {
        const int64_t base = (span.first_chunk + c) * kChunk;
        return where.find(base, max(range.first - base, 0), min(range.last + 1 - base, kChunk), chunk);
    };
    if (from < to && !find(from, source, chunks[from % 2])) return false;
    for (int64_t c = from; c < to; c++) {
        const int64_t base = (span.first_chunk + c) * kChunk;
        const Partials parts = find_partials(job, span, source.head, c);
        rows.set_visible(base);
        Chunk<T>& chunk = chunks[c % 2];
        Chunk<T>& next = chunks[(c + 1) % 2];
        if (c + 1 < to && !find(c + 1, source, next)) return false;
        if (c + 1 == to && more && !find(from, beside, next)) return false;
        chunk.next = c + 1 < to || more ? &next : &chunk;
        attend_chunk(rows, chunk, base, job.call.rule, later ? &parts : nullptr);
    }
    return true;
}

// The same, each chunk widened to float32 before.
template <class T>
bool attend_widened(const Job& job, const Span& span, const Source<T>& source, const Range& range, int64_t from,
                    int64_t to, Rows& rows, float* room) {
    const bool later = span.num_pieces > 1;
    Chunk<float> wide;
    for (int64_t c = from; c < to; c++) {
        const int64_t base = (span.first_chunk + c) * kChunk;
        const Partials parts = find_partials(job, span, source.head, c);
        rows.set_visible(base);
        const int64_t least = max(range.first - base, 0), most = min(range.last + 1 - base, kChunk);
        if (!source.find_widened(base, least, most, rows.size, room, wide)) return false;
        attend_chunk(rows, wide, base, job.call.rule, later ? &parts : nullptr);
    }
    return true;
}

template <class T>
bool attend_line(const Job& job, const Span& span, const Source<T>& source, const Range& range, int64_t from,
                 int64_t to, Rows& rows, float* room) {
    if constexpr (kInPlace<T>)
        if (job.call.is_in_groups() && (sizeof(T) == 4 || rows.count <= kDirectRows))
            return attend_in_place(job, span, source, range, from, to, rows);
    return attend_widened(job, span, source, range, from, to, rows, room);
}

// Attends to the chunks [from, to) of a span, those that hold nodes of a tree last.
template <class T>
bool attend_chunks(const Job& job, const Span& span, int64_t kv_head, int64_t from, int64_t to, Rows& rows,
                   float* room) {
    const Call& call = job.call;
    const Source<T> source = {call.cache, call.table + span.sequence * call.table_stride, call.table_width, kv_head};
    const bool later = span.num_pieces > 1;
    const Range range = find_range(call, span.sequence, span.begin, span.end);
    const int64_t tail = max(from, min(to, call.tail_chunk(span.sequence) - span.first_chunk));
    if (!attend_line(job, span, source, range, from, tail, rows, room)) return false;
    for (int64_t c = tail; c < to; c++) {
        const int64_t base = (span.first_chunk + c) * kChunk, padded = Rows::pad(rows.count);
        float* own = room + Source<T>::room_floats(rows.head_size, rows.size);
        char* memory = reinterpret_cast<char*>(own + count_chunk_floats(call, rows.count));
        const Partials parts =
            later ? find_partials(job, span, kv_head, c) : Partials{own, own + padded, own + 2 * padded};
        rows.set_visible(base);
        if (!attend_tail(call, span, kv_head, source, range, base, rows, room, memory, parts)) return false;
        if (!later) merge(rows, parts);
    }
    return true;
}

template <class T>
bool attend_item(const Job& job, int64_t index, int64_t item) {
    const Call& call = job.call;
    const Span& span = job.spans[index];
    const int64_t kv_head = (item - span.item) / span.num_pieces, piece = (item - span.item) % span.num_pieces;
    const int64_t count = (span.end - span.begin) * call.group(), head_size = call.cache.head_size;
    const int64_t bytes = Rows::bytes(count, head_size, call.size());
    const int64_t room = Source<T>::room_floats(head_size, call.size()) * sizeof(float);
    char* memory = static_cast<char*>(scratch(bytes + room + count_tail_bytes(call, count)));
    Rows rows(count, head_size, call.size(), memory);
    take_queries(call, span, kv_head, rows);
    const int64_t length = chunks_per_piece(job, span), from = piece * length;
    const int64_t to = min(from + length, span.num_chunks);
    if (!attend_chunks<T>(job, span, kv_head, from, to, rows, reinterpret_cast<float*>(memory + bytes))) return false;
    if (span.num_pieces > 1) {
        int32_t* left = job.left + index * call.cache.num_heads + kv_head;
        if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) != 0) return true;
        for (int64_t c = 0; c < span.num_chunks; c++) {
            rows.set_visible((span.first_chunk + c) * kChunk);
            merge(rows, find_partials(job, span, kv_head, c));
        }
    }
    write_outputs(call, span, kv_head, rows);
    return true;
}

template <class T>
int32_t attend_spans(const Job& job) {
    const int64_t work = 16 * job.total * job.call.cache.head_size / max(job.num_items, 1);
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

// Lowers the tokens per span when there are too few spans for the threads.
int64_t tokens_per_span(const Call& call, int64_t longest) {
    const int64_t num_tokens = call.query_start[call.num_sequences];
    int64_t tokens = max(1, kRows / call.group());
    while (tokens * call.group() >= 2 * kMinRows && num_threads() > 1 &&
           ceil_div(num_tokens, tokens) * call.cache.num_heads < 4 * num_threads())
        tokens = tokens / 2;
    return min(tokens, longest);
}

int32_t attend_step(const Call& call, int32_t type) {
    int64_t longest = 0;
    for (int64_t s = 0; s < call.num_sequences; s++) {
        const int64_t num = call.query_start[s + 1] - call.query_start[s];
        if (call.lengths[s] < num) return kBadIndex;
        longest = max(longest, num);
    }
    if (longest == 0) return kDone;
    if (call.tail && !is_tail_valid(*call.tail, call.query_start, call.lengths, call.num_sequences)) return kBadIndex;
    const Job job = plan_job(call, tokens_per_span(call, longest));
    return with_cache_type(type, [&](auto* typed) {
        using Stored = typename Pointee<decltype(typed)>::Type;
        return attend_spans<Stored>(job);
    });
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

// Strides count elements: from token to token in q, from block to block in the caches and their scales.
KERNEL(attention)(const float* q, int64_t q_stride, void* k_cache, int64_t k_stride, void* v_cache, int64_t v_stride,
                  float* k_scale, int64_t k_scale_stride, float* v_scale, int64_t v_scale_stride, int32_t type,
                  int64_t num_blocks, const int32_t* table, int64_t table_stride, int64_t table_width,
                  const int32_t* query_start, const int32_t* lengths, int64_t num_sequences, int64_t num_heads,
                  int64_t num_kv_heads, int64_t block_size, int64_t head_size, float scale, int64_t window,
                  float softcap, const float* alibi, const float* sinks, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    const PagedCache cache = {k_cache,        v_cache,        k_stride,   v_stride,     k_scale,    v_scale,
                              k_scale_stride, v_scale_stride, num_blocks, num_kv_heads, block_size, head_size};
    const Rule rule = {scale, softcap};
    const Call call = {cache,         q,         q_stride, table,  table_stride, table_width, query_start, lengths,
                       num_sequences, num_heads, rule,     window, alibi,        sinks,       out,         nullptr};
    return attend_step(call, type);
}

KERNEL(tree_attention)(const float* q, int64_t q_stride, void* k_cache, int64_t k_stride, void* v_cache,
                       int64_t v_stride, float* k_scale, int64_t k_scale_stride, float* v_scale, int64_t v_scale_stride,
                       int32_t type, int64_t num_blocks, const int32_t* table, int64_t table_stride,
                       int64_t table_width, const int32_t* query_start, const int32_t* lengths, int64_t num_sequences,
                       int64_t num_heads, int64_t num_kv_heads, int64_t block_size, int64_t head_size, float scale,
                       int64_t window, float softcap, const float* alibi, const float* sinks, const int32_t* begins,
                       const int64_t* positions, const int32_t* nodes, int64_t node_stride, int64_t num_nodes,
                       float* out) {
    using namespace penstock::PENSTOCK_PATH;
    const PagedCache cache = {k_cache,        v_cache,        k_stride,   v_stride,     k_scale,    v_scale,
                              k_scale_stride, v_scale_stride, num_blocks, num_kv_heads, block_size, head_size};
    const Rule rule = {scale, softcap};
    const Tail tail = {begins, positions, nodes, node_stride, num_nodes};
    const Call call = {cache,         q,         q_stride, table,  table_stride, table_width, query_start, lengths,
                       num_sequences, num_heads, rule,     window, alibi,        sinks,       out,         &tail};
    return attend_step(call, type);
}

EXPORT(attention)
EXPORT(tree_attention)
