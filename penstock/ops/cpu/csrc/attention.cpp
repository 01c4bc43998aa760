#include <cstdlib>

#include "partial.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

constexpr int64_t kTokens = 16;         // query tokens per work item: they share the reading of keys and values

struct Call {
    const float* q;
    int64_t q_stride;
    const void *k_cache, *v_cache;
    int64_t k_stride, v_stride, num_blocks;          // strides from block to block
    const int32_t* table;
    int64_t table_stride, table_width;
    const int32_t *query_start, *lengths;
    int64_t num_heads, num_kv_heads, block_size, head_size;
    Rule rule;
    int64_t window;
    const float* alibi;
    float* out;
};

struct Span {                           // query tokens of one sequence
    int32_t sequence, begin, end;
};

// Heads [head, head + num_heads), all of one group, for one span; false if the table leads nowhere.
template <class T>
bool attend_span(const Call& call, const Span& span, int64_t head, int64_t num_heads) {
    const int64_t size = ceil_div(call.head_size, kLanes) * kLanes, count = (span.end - span.begin) * num_heads;
    Bench bench(count, size);
    for (int64_t i = 0; i < count; i++) {
        const int64_t token = span.begin + i / num_heads, h = head + i % num_heads;
        const int64_t last = call.lengths[span.sequence] - (call.query_start[span.sequence + 1] - token);
        const int64_t first = call.window > 0 ? larger(0, last - call.window + 1) : 0;
        bench.add(i, call.q + token * call.q_stride + h * call.head_size,
                  call.out + (token * call.num_heads + h) * call.head_size, call.head_size, size, first, last,
                  call.alibi != nullptr ? call.alibi[h] : 0.0f);
    }
    const int64_t kv_head = head / (call.num_heads / call.num_kv_heads);
    const int32_t* table = call.table + span.sequence * call.table_stride;
    const T *k_cache = static_cast<const T*>(call.k_cache), *v_cache = static_cast<const T*>(call.v_cache);
    const auto fill = [&](Chunk& chunk, int64_t begin, int64_t end) {
        for (int64_t position = begin; position < end; position++) {
            const int64_t index = position / call.block_size, j = position % kChunk;
            const int64_t block = index < call.table_width ? table[index] : -1;
            if (block < 0 || block >= call.num_blocks) return false;
            const int64_t offset = (kv_head * call.block_size + position % call.block_size) * call.head_size;
            const T *k = k_cache + block * call.k_stride + offset, *v = v_cache + block * call.v_stride + offset;
            chunk.k[j] = padded_row(k, bench.k + j * size, call.head_size, size);
            chunk.v[j] = padded_row(v, bench.v + j * size, call.head_size, size);
        }
        return true;
    };
    return attend_all(bench.queries, count, call.head_size, size, call.rule, fill);
}

template <class T>
int32_t attend_spans(const Call& call, const Span* spans, int64_t num_spans, int64_t longest) {
    // A whole group of heads reads its keys once; with few items each head goes alone, to have work for every thread.
    const int64_t groups = call.num_heads / call.num_kv_heads;
    const int64_t together = num_spans * call.num_kv_heads >= 2 * num_threads() ? groups : 1;
    const int64_t per_span = call.num_heads / together;
    int32_t result = kDone;
    parallel_for(num_spans * per_span, longest * together * call.head_size, [&](int64_t item) {
        if (!attend_span<T>(call, spans[item / per_span], item % per_span * together, together))
            __atomic_store_n(&result, kBadIndex, __ATOMIC_RELAXED);
    });
    return result;
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(attention)(const float* q, int64_t q_stride, const void* k_cache, int64_t k_stride, const void* v_cache,
                  int64_t v_stride, int32_t type, int64_t num_blocks, const int32_t* table, int64_t table_stride,
                  int64_t table_width, const int32_t* query_start, const int32_t* lengths, int64_t num_sequences,
                  int64_t num_heads, int64_t num_kv_heads, int64_t block_size, int64_t head_size, float scale,
                  int64_t window, float softcap, const float* alibi, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    const Call call = {q, q_stride, k_cache, v_cache, k_stride, v_stride, num_blocks, table, table_stride, table_width,
                       query_start, lengths, num_heads, num_kv_heads, block_size, head_size, {scale, softcap}, window,
                       alibi, out};
    int64_t num_spans = 0, longest = 0;
    for (int64_t s = 0; s < num_sequences; s++) {
        if (lengths[s] < query_start[s + 1] - query_start[s]) return kBadIndex;
        num_spans += ceil_div(query_start[s + 1] - query_start[s], kTokens);
        longest = larger(longest, lengths[s]);
    }
    if (num_spans == 0) return kDone;
    Span* spans = static_cast<Span*>(std::malloc(num_spans * sizeof(Span)));
    if (spans == nullptr) std::abort();
    int64_t next = 0;
    for (int64_t s = 0; s < num_sequences; s++)
        for (int64_t t = query_start[s]; t < query_start[s + 1]; t += kTokens)
            spans[next++] = {int32_t(s), int32_t(t), int32_t(smaller(t + kTokens, query_start[s + 1]))};
    const int32_t result = with_type(type, [&](auto* typed) {
        using Stored = typename Pointee<decltype(typed)>::Type;
        return attend_spans<Stored>(call, spans, num_spans, longest);
    });
    std::free(spans);
    return result;
}

PACKED(attention)
