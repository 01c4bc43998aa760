// The router of a mixture of experts, and the sum of what the chosen ones give.
#include "elementary.h"

namespace penstock {
namespace PENSTOCK_PATH {
namespace {

enum : int32_t { kSoftmax = 0, kSigmoid = 1, kSparsemixer = 2 };  // as in SCORES of ops/experts/route.py

struct RouterRule {
    int64_t num_experts, num_chosen;
    int32_t score, normalizes;
    float scale;
    int64_t num_groups, top_groups, best_of_group;
    float jitter;
};

constexpr float kNever = -__builtin_inff();

// Takes the largest of values that is not taken, the first of equal ones; NaN is never larger.
inline int64_t take_best(const float* values, int64_t count, uint8_t* taken) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    taken[best] = 1;
    return best;
}

// Softmax over all values, or over the marked ones; the others are left alone.
inline void softmax(const float* x, int64_t count, const uint8_t* marked, float* to) {
    float most = kNever, total = 0.0f;
    for (int64_t i = 0; i < count; i++)
        if ((marked == nullptr || marked[i]) && x[i] > most) most = x[i];
    for (int64_t i = 0; i < count; i++)
        if (marked == nullptr || marked[i]) total += to[i] = exponential(x[i] - most);
    for (int64_t i = 0; i < count; i++)
        if (marked == nullptr || marked[i]) to[i] /= total;
}

// Memory for one row: scores, choices, groups' scores, and marks.
struct Room {
    float *scores, *choices, *groups;
    uint8_t *taken, *marks;

    explicit Room(int64_t count) {
        scores = static_cast<float*>(scratch(count * (3 * sizeof(float) + 2)));
        choices = scores + count;
        groups = choices + count;
        taken = reinterpret_cast<uint8_t*>(groups + count);
        marks = taken + count;
    }
};

// Leaves only the choices of the best groups.
void keep_groups(const RouterRule& rule, const Room& room) {
    const int64_t size = rule.num_experts / rule.num_groups;
    std::memset(room.taken, 0, rule.num_experts);
    for (int64_t g = 0; g < rule.num_groups; g++) {
        room.groups[g] = 0.0f;
        for (int64_t i = 0; i < rule.best_of_group; i++) {
            const int64_t best = take_best(room.choices + g * size, size, room.taken + g * size);
            room.groups[g] += room.choices[g * size + best];
        }
    }
    std::memset(room.marks, 0, rule.num_groups);
    for (int64_t i = 0; i < rule.top_groups; i++) take_best(room.groups, rule.num_groups, room.marks);
    for (int64_t e = 0; e < rule.num_experts; e++)
        if (!room.marks[e / size]) room.choices[e] = kNever;
}

// Marks the chosen experts in `taken`, with their weights in `scores`.
void choose_by_score(const RouterRule& rule, const float* logits, const float* bias, const Room& room) {
    const int64_t count = rule.num_experts;
    if (rule.score == kSoftmax) softmax(logits, count, nullptr, room.scores);
    else
        for (int64_t e = 0; e < count; e++) room.scores[e] = sigmoid(logits[e]);
    const bool by_logits = bias == nullptr && rule.best_of_group == 1;
    for (int64_t e = 0; e < count; e++)
        room.choices[e] = (by_logits ? logits : room.scores)[e] + (bias == nullptr ? 0.0f : bias[e]);
    if (rule.num_groups > 1) keep_groups(rule, room);
    std::memset(room.taken, 0, count);
    for (int64_t k = 0; k < rule.num_chosen; k++) take_best(room.choices, count, room.taken);
    if (!rule.normalizes) return;
    if (rule.score == kSoftmax) return softmax(logits, count, room.taken, room.scores);
    float total = 0.0f;
    for (int64_t e = 0; e < count; e++)
        if (room.taken[e]) total += room.scores[e];
    for (int64_t e = 0; e < count; e++) room.scores[e] /= total + 1e-20f;
}

void mix_sparsely(const RouterRule& rule, const float* logits, const Room& room) {
    const int64_t count = rule.num_experts;
    std::memset(room.taken, 0, count);
    for (int64_t k = 0; k < rule.num_chosen; k++) {
        std::memcpy(room.marks, room.taken, count);
        const int64_t best = take_best(logits, count, room.taken);
        const float most = logits[best];
        float total = 0.0f;
        for (int64_t e = 0; e < count; e++) {
            const float size = from_bits(to_bits(logits[e]) & 0x7fffffff);
            const float distance = (most - logits[e]) / (size > most ? size : most);  // 0 / 0 is no distance
            if (!room.marks[e] && !(distance > 2 * rule.jitter)) total += exponential(logits[e] - most);
        }
        room.scores[best] = 1.0f / total;
    }
}

}  // namespace
}  // namespace PENSTOCK_PATH
}  // namespace penstock

KERNEL(route)(const float* logits, int64_t stride, int64_t num_rows, int64_t num_experts, const float* bias,
              int64_t num_chosen, int32_t score, int32_t normalizes, float scale, int64_t num_groups,
              int64_t top_groups, int64_t best_of_group, float jitter, int32_t* ids, float* weights) {
    using namespace penstock::PENSTOCK_PATH;
    const RouterRule rule = {num_experts, num_chosen, score,         normalizes, scale,
                             num_groups,  top_groups, best_of_group, jitter};
    parallel_for(num_rows, num_experts * (num_chosen + 16), [&](int64_t row) {
        const Room room(num_experts);
        const float* x = logits + row * stride;
        if (score == kSparsemixer) mix_sparsely(rule, x, room);
        else choose_by_score(rule, x, bias, room);
        int64_t k = row * num_chosen;
        for (int64_t e = 0; e < num_experts; e++) {
            if (!room.taken[e]) continue;
            ids[k] = int32_t(e);
            weights[k++] = room.scores[e] * scale;
        }
    });
    return kDone;
}

KERNEL(weigh)(const float* x, int64_t x_stride, int64_t num_rows, int64_t num_chosen, int64_t width,
              const float* weights, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    parallel_for(num_rows * num_chosen, width, [&](int64_t p) {
        const float *from = x + p / num_chosen * x_stride, factor = weights[p];
        float* to = out + p * width;
        for (int64_t c = 0; c < width; c++) to[c] = from[c] * factor;
    });
    return kDone;
}

KERNEL(combine)(const float* y, int64_t num_rows, int64_t num_chosen, int64_t width, const float* weights,
                const float* shared, int64_t shared_stride, const float* gate, const float* residual,
                int64_t residual_stride, float* out) {
    using namespace penstock::PENSTOCK_PATH;
    parallel_for(num_rows, width * (num_chosen + 1), [&](int64_t row) {
        const float* from = y + row * num_chosen * width;
        const auto factor = [&](int64_t k) { return weights == nullptr ? 1.0f : weights[row * num_chosen + k]; };
        float* to = out + row * width;
        const float first = factor(0);
        for (int64_t c = 0; c < width; c++) to[c] = from[c] * first;
        for (int64_t k = 1; k < num_chosen; k++) {
            const float next = factor(k);
            for (int64_t c = 0; c < width; c++) to[c] = to[c] + from[k * width + c] * next;
        }
        const float open = gate == nullptr ? 1.0f : sigmoid(gate[row]);
        if (shared != nullptr)
            for (int64_t c = 0; c < width; c++) to[c] = shared[row * shared_stride + c] * open + to[c];
        if (residual != nullptr)
            for (int64_t c = 0; c < width; c++) to[c] = residual[row * residual_stride + c] + to[c];
    });
    return kDone;
}

EXPORT(route)
EXPORT(weigh)
EXPORT(combine)
