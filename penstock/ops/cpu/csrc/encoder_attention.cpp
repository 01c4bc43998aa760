#include "partial.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

constexpr int64_t kTokens = 32;         // query tokens per work item

struct Call {
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride, num_heads, head_size;
    Rule rule;
    float* out;
};

// Query tokens [token, until) of the sequence [begin, end), one head.
void attend_tokens(const Call& call, int64_t head, int64_t token, int64_t until, int64_t begin, int64_t end) {
    const int64_t size = ceil_div(call.head_size, kLanes) * kLanes, shift = head * call.head_size;
    Bench bench(until - token, size);
    for (int64_t i = 0; i < until - token; i++)
        bench.add(i, call.q + (token + i) * call.q_stride + shift,
                  call.out + (token + i) * call.num_heads * call.head_size + shift, call.head_size, size, 0,
                  end - begin - 1, 0.0f);
    const auto fill = [&](Chunk& chunk, int64_t first, int64_t last) {
        for (int64_t position = first; position < last; position++) {
            const int64_t t = begin + position, j = position % kChunk;
            chunk.k[j] = padded_row(call.k + t * call.k_stride + shift, bench.k + j * size, call.head_size, size);
            chunk.v[j] = padded_row(call.v + t * call.v_stride + shift, bench.v + j * size, call.head_size, size);
        }
        return true;
    };
    attend_all(bench.queries, until - token, call.head_size, size, call.rule, fill);
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(encoder_attention)(const float* q, int64_t q_stride, const float* k, int64_t k_stride, const float* v,
                          int64_t v_stride, const int32_t* query_start, int64_t num_sequences, int64_t num_heads,
                          int64_t head_size, float scale, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    const Call call = {q, k, v, q_stride, k_stride, v_stride, num_heads, head_size, {scale, 0.0f}, out};
    for (int64_t s = 0; s < num_sequences; s++) {
        const int64_t begin = query_start[s], end = query_start[s + 1], spans = ceil_div(end - begin, kTokens);
        parallel_for(spans * num_heads, kTokens * (end - begin) * head_size / 4, [&](int64_t item) {
            const int64_t token = begin + item / num_heads * kTokens;
            attend_tokens(call, item % num_heads, token, smaller(token + kTokens, end), begin, end);
        });
    }
    return kDone;
}

PACKED(encoder_attention)
