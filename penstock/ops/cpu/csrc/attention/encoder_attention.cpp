#include "attention/paged.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

constexpr int64_t kTokens = 48;  // query tokens per work item

struct Encoding {
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride, num_heads, head_size;
    Rule rule;
    float* out;
};

// Copies the tokens [begin, end), at most 64, to `room`: keys transposed, values padded.
Chunk<float> copy_chunk(const Encoding& call, int64_t head, int64_t begin, int64_t end, float* room) {
    Chunk<float> chunk;
    chunk.k_stride = kLanes, chunk.v_row = kLanes, chunk.v_stride = kChunk * kLanes, chunk.scaled = false;
    float *keys = room, *values = room + kChunk * call.head_size;
    for (int64_t g = 0; g < kGroups; g++) {
        chunk.k[g] = keys + g * kLanes * call.head_size;
        chunk.v[g] = values + g * kLanes * kLanes;
    }
    for (int64_t j = 0; j < end - begin; j++) {
        const float* k = call.k + (begin + j) * call.k_stride + head * call.head_size;
        const float* v = call.v + (begin + j) * call.v_stride + head * call.head_size;
        float* to = keys + j / kLanes * kLanes * call.head_size + j % kLanes;
        for (int64_t d = 0; d < call.head_size; d++) to[d * kLanes] = k[d];
        widen_values(v, 1, call.head_size, values + j * kLanes);
    }
    return chunk;
}

// Attends for the query tokens [token, until) of the sequence [begin, end), one head.
void attend_tokens(const Encoding& call, int64_t head, int64_t token, int64_t until, int64_t begin, int64_t end) {
    const int64_t size = ceil_div(call.head_size, kLanes) * kLanes, count = until - token;
    const int64_t bytes = Rows::bytes(count, call.head_size, size);
    char* memory = static_cast<char*>(scratch(bytes + kChunk * (call.head_size + size) * sizeof(float)));
    Rows rows(count, call.head_size, size, memory);
    rows.pack([&](int64_t i) { return call.q + (token + i) * call.q_stride + head * call.head_size; });
    for (int64_t i = 0; i < count; i++)
        rows.first[i] = 0, rows.last[i] = int32_t(end - begin - 1), rows.slope[i] = 0.0f;
    for (int64_t base = 0; base < end - begin; base += kChunk) {
        rows.set_visible(base);
        Chunk<float> chunk = copy_chunk(call, head, begin + base, min(begin + base + kChunk, end),
                                        reinterpret_cast<float*>(memory + bytes));
        chunk.next = &chunk;
        attend_chunk(rows, chunk, base, call.rule, nullptr);
    }
    for (int64_t i = 0; i < count; i++)
        write_output(rows, i, nullptr, call.out + ((token + i) * call.num_heads + head) * call.head_size);
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(encoder_attention)(const float* q, int64_t q_stride, const float* k, int64_t k_stride, const float* v,
                          int64_t v_stride, const int32_t* query_start, int64_t num_sequences, int64_t num_heads,
                          int64_t head_size, float scale, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    const Encoding call = {q, k, v, q_stride, k_stride, v_stride, num_heads, head_size, {scale, 0.0f}, out};
    for (int64_t s = 0; s < num_sequences; s++) {
        const int64_t begin = query_start[s], end = query_start[s + 1], spans = ceil_div(end - begin, kTokens);
        parallel_for(spans * num_heads, kTokens * (end - begin) * head_size / 4, [&](int64_t item) {
            const int64_t token = begin + item / num_heads * kTokens;
            attend_tokens(call, item % num_heads, token, min(token + kTokens, end), begin, end);
        });
    }
    return kDone;
}

EXPORT(encoder_attention)
