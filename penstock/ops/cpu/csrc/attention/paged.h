// Attention over a paged cache: the call, and where the keys and values of a chunk lie.
#pragma once

#include "attention/partial.h"

namespace penstock {
namespace PENSTOCK_PATH {

// Draft tokens that form a tree: of sequence s from position begins[s] on, position begins[s] + i of query t lies at
// place begins[s] + nodes[t][i]. A sequence without a tree begins at its length or later.
struct Tail {
    const int32_t* begins;
    const int64_t* positions;  // of the queries
    const int32_t* nodes;
    int64_t stride, width;  // of nodes
};

// True if every query of a tree's step lies in its sequence, and its path in the tail.
inline bool is_tail_valid(const Tail& tail, const int32_t* query_start, const int32_t* lengths, int64_t num_sequences) {
    for (int64_t s = 0; s < num_sequences; s++) {
        const int64_t begin = tail.begins[s], length = lengths[s];
        if (begin < 0) return false;
        for (int64_t t = query_start[s]; t < query_start[s + 1]; t++) {
            const int64_t position = tail.positions[t];
            if (position < 0 || position >= length || position - begin >= tail.width) return false;
            for (int64_t i = 0; i <= position - begin; i++) {
                const int64_t node = tail.nodes[t * tail.stride + i];
                if (node < 0 || node >= length - begin) return false;
            }
        }
    }
    return true;
}

struct Call {
    PagedCache cache;
    const float* q;
    int64_t q_stride;
    const int32_t* table;
    int64_t table_stride, table_width;
    const int32_t *query_start, *lengths;
    int64_t num_sequences, num_heads;
    Rule rule;
    int64_t window;  // positions seen; negative: the size of chunks, of which a token sees its own; 0: all
    const float *alibi, *sinks;
    float* out;
    const Tail* tail;  // null: positions are places

    int64_t group() const { return num_heads / cache.num_heads; }
    int64_t size() const { return ceil_div(cache.head_size, kLanes) * kLanes; }
    int64_t position_of(int64_t sequence, int64_t token) const {
        return tail ? tail->positions[token] : lengths[sequence] - (query_start[sequence + 1] - token);
    }
    // The first chunk that holds nodes of a tree.
    int64_t tail_chunk(int64_t sequence) const {
        return tail && tail->begins[sequence] < lengths[sequence] ? tail->begins[sequence] / kChunk : INT32_MAX;
    }
    int64_t first_of(int64_t sequence, int64_t token) const {  // the first position the token sees
        const int64_t position = position_of(sequence, token);
        if (window < 0) return position - position % -window;
        return window > 0 ? max(0, position - window + 1) : 0;
    }
    // True if 16 positions of keys, and 16 dimensions of values, always lie side by side.
    bool is_in_groups() const { return cache.block_size % kLanes == 0 && cache.head_size % kLanes == 0; }
};

// Widens the values of `count` positions into groups of 16 dimensions, each with its 64 positions, padded with zeros.
template <class T>
inline void widen_values(const T* from, int64_t count, int64_t head_size, float* to) {
    for (int64_t d = 0; d < head_size; d += kLanes, to += kChunk * kLanes) {
        for (int64_t j = 0; j < count; j++) {
            const T* row = from + j * head_size + d;
            if (d + kLanes <= head_size) {
                Vec group[kParts];
                load_group(row, group);
                std::memcpy(to + j * kLanes, group, sizeof group);
            } else {
                for (int64_t i = 0; i < kLanes; i++) to[j * kLanes + i] = d + i < head_size ? widen(row[i]) : 0.0f;
            }
        }
    }
}

// One key/value head of one sequence.
template <class T>
struct Source {
    const PagedCache& cache;
    const int32_t* table;
    int64_t table_width, head;

    // The block of a table entry, or -1 if there is none.
    int64_t block_at(int64_t index) const {
        const int64_t block = index < table_width ? table[index] : -1;
        return block < cache.num_blocks ? block : -1;
    }
    const T* keys(int64_t block, int64_t place) const {
        const T* keys = static_cast<const T*>(cache.k) + block * cache.k_stride;
        return keys + head * cache.head_size * cache.block_size + place;
    }
    const T* values(int64_t block, int64_t place) const {
        const T* values = static_cast<const T*>(cache.v) + block * cache.v_stride;
        return values + (head * cache.block_size + place) * cache.head_size;
    }
    const float* key_scales(int64_t block, int64_t place) const {
        return cache.k_scale + block * cache.k_scale_stride + head * cache.block_size + place;
    }
    const float* value_scales(int64_t block, int64_t place) const {
        return cache.v_scale + block * cache.v_scale_stride + head * cache.block_size + place;
    }

    // Points the chunk at `base` to the groups of [least, most) in place; blocks are whole groups.
    bool find(int64_t base, int64_t least, int64_t most, Chunk<T>& chunk) const {
        chunk.k_stride = cache.block_size, chunk.v_row = cache.head_size, chunk.v_stride = kLanes;
        chunk.scaled = cache.k_scale != nullptr, chunk.next = &chunk;
        const int64_t first = least / kLanes;
        int64_t index = (base + first * kLanes) / cache.block_size, place = (base + first * kLanes) % cache.block_size;
        int64_t g = first;
        for (; g * kLanes < most; g++, place += kLanes) {
            if (place == cache.block_size) index++, place = 0;
            const int64_t block = block_at(index);
            if (block < 0) return false;
            chunk.k[g] = keys(block, place), chunk.v[g] = values(block, place);
            if (!chunk.scaled) continue;
            chunk.k_scale[g] = key_scales(block, place), chunk.v_scale[g] = value_scales(block, place);
        }
        for (int64_t other = 0; other < kGroups; other++)  // may be prefetched, never read
            if (other < first || other >= g) chunk.k[other] = chunk.k[first], chunk.v[other] = chunk.v[first];
        return true;
    }

    static int64_t room_floats(int64_t head_size, int64_t size) { return kChunk * (head_size + size + 2); }

    // The same, widened to float32 in `room`, for blocks of any size.
    bool find_widened(int64_t base, int64_t least, int64_t most, int64_t size, float* room, Chunk<float>& chunk) const {
        float *k = room, *v = k + kChunk * cache.head_size, *k_scale = v + kChunk * size, *v_scale = k_scale + kChunk;
        chunk.k_stride = kLanes, chunk.v_row = kLanes, chunk.v_stride = kChunk * kLanes;
        chunk.scaled = cache.k_scale != nullptr, chunk.next = &chunk;
        for (int64_t g = 0; g < kGroups; g++) {
            chunk.k[g] = k + g * kLanes * cache.head_size, chunk.v[g] = v + g * kLanes * kLanes;
            chunk.k_scale[g] = k_scale + g * kLanes, chunk.v_scale[g] = v_scale + g * kLanes;
        }
        for (int64_t j = least / kLanes * kLanes; j < most;) {  // runs of positions in one group and one block
            const int64_t index = (base + j) / cache.block_size, place = (base + j) % cache.block_size;
            const int64_t block = block_at(index), count = min(kLanes - j % kLanes, cache.block_size - place);
            if (j + count > least) {
                if (block < 0) return false;
                widen_keys(keys(block, place), count, k + j / kLanes * kLanes * cache.head_size + j % kLanes);
                widen_values(values(block, place), count, cache.head_size, v + j * kLanes);
                for (int64_t i = 0; chunk.scaled && i < count; i++)
                    k_scale[j + i] = key_scales(block, place)[i], v_scale[j + i] = value_scales(block, place)[i];
            }
            j += count;
        }
        return true;
    }

    // Widens what lies at `place` into position `j` of a chunk that find_widened() pointed into `room`.
    bool widen_place(int64_t place, int64_t j, int64_t size, float* room) const {
        float *k = room, *v = k + kChunk * cache.head_size, *k_scale = v + kChunk * size, *v_scale = k_scale + kChunk;
        const int64_t block = block_at(place / cache.block_size), offset = place % cache.block_size;
        if (block < 0) return false;
        widen_keys(keys(block, offset), 1, k + j / kLanes * kLanes * cache.head_size + j % kLanes);
        widen_values(values(block, offset), 1, cache.head_size, v + j * kLanes);
        if (cache.k_scale != nullptr)
            k_scale[j] = *key_scales(block, offset), v_scale[j] = *value_scales(block, offset);
        return true;
    }

    void widen_keys(const T* from, int64_t count, float* to) const {
        for (int64_t d = 0; d < cache.head_size; d++, from += cache.block_size, to += kLanes) {
            if (count == kLanes) {
                Vec group[kParts];
                load_group(from, group);
                std::memcpy(to, group, sizeof group);
            } else {
                for (int64_t i = 0; i < count; i++) to[i] = widen(from[i]);
            }
        }
    }
};

// int4 codes are always widened: keys to groups of 16 positions, values to groups of 16 dimensions.
template <>
struct Source<i4> {
    const PagedCache& cache;
    const int32_t* table;
    int64_t table_width, head;

    static int64_t room_floats(int64_t head_size, int64_t size) { return kChunk * (head_size + size); }

    bool find_widened(int64_t base, int64_t least, int64_t most, int64_t size, float* room, Chunk<float>& chunk) const {
        float *k = room, *v = k + kChunk * cache.head_size;
        chunk.k_stride = kLanes, chunk.v_row = kLanes, chunk.v_stride = kChunk * kLanes;
        chunk.scaled = false, chunk.next = &chunk;
        for (int64_t g = 0; g < kGroups; g++)
            chunk.k[g] = k + g * kLanes * cache.head_size, chunk.v[g] = v + g * kLanes * kLanes;
        for (int64_t j = least / kLanes * kLanes; j < most;) {  // runs of positions in one group and one block
            const int64_t place = base + j,
                          count = min(kLanes - j % kLanes, cache.block_size - place % cache.block_size);
            if (j + count > least && !widen_run(place, count, j, size, room)) return false;
            j += count;
        }
        return true;
    }

    bool widen_place(int64_t place, int64_t j, int64_t size, float* room) const {
        return widen_run(place, 1, j, size, room);
    }

    // Widens `count` positions of one block, from `place` on, to position `j` of the chunk and those after it.
    bool widen_run(int64_t place, int64_t count, int64_t j, int64_t size, float* room) const {
        const int64_t index = place / cache.block_size, block = index < table_width ? table[index] : -1;
        if (block < 0 || block >= cache.num_blocks) return false;
        const CodeSlot from(cache, block * cache.block_size + place % cache.block_size, head);
        float *k = room + j / kLanes * kLanes * cache.head_size + j % kLanes, *v = room + kChunk * cache.head_size;
        for (int64_t g = 0; g < CodeGroup::num(cache.head_size); g++) {
            const CodeGroup group(g, cache.head_size);
            if (count == kLanes) widen_keys_of_all(from, group, k);
            else widen_keys(from, group, count, k);
            for (int64_t i = 0; i < count; i++) widen_values(from, group, i, v + (j + i) * kLanes);
        }
        if (size > cache.head_size)  // the last group of 16 dimensions is padded with zeros
            for (int64_t i = 0; i < count; i++)
                for (int64_t d = cache.head_size; d < size; d++) v[value_index(j + i, d)] = 0.0f;
        return true;
    }

    static int64_t value_index(int64_t j, int64_t d) { return d / kLanes * kChunk * kLanes + j * kLanes + d % kLanes; }

    static void widen_keys(const CodeSlot& from, const CodeGroup& group, int64_t count, float* k) {
        const f16* scales = from.k_scales + 2 * group.index * from.width;
        const i4* bytes = from.keys + group.begin / 2 * from.width;
        float* low = k + group.begin * kLanes;
        for (int64_t i = 0, half = group.half(); i < half; i++)
            for (int64_t p = 0; p < count; p++) {
                const float scale = widen(scales[p]), minimum = widen(scales[from.width + p]);
                const int codes = bytes[i * from.width + p].codes;
                low[i * kLanes + p] = float(codes & 15) * scale + minimum;
                low[(i + half) * kLanes + p] = float(codes >> 4) * scale + minimum;
            }
    }

    static void widen_keys_of_all(const CodeSlot& from, const CodeGroup& group, float* k) {
        const f16* scales = from.k_scales + 2 * group.index * from.width;
        const i4* bytes = from.keys + group.begin / 2 * from.width;
        float* low = k + group.begin * kLanes;
        Vec scale[kParts], minimum[kParts], codes[2][kParts];
        load_group(scales, scale);
        load_group(scales + from.width, minimum);
        for (int64_t i = 0, half = group.half(); i < half; i++) {
            load_codes(&bytes[i * from.width].codes, codes[0], codes[1]);
            for (int part = 0; part < kParts; part++) {
                store(low + i * kLanes + part * kWidth, codes[0][part] * scale[part] + minimum[part]);
                store(low + (i + half) * kLanes + part * kWidth, codes[1][part] * scale[part] + minimum[part]);
            }
        }
    }

    static void widen_values(const CodeSlot& from, const CodeGroup& group, int64_t i, float* v) {
        const int64_t groups = CodeGroup::num(from.head_size);
        const f16* scales = from.v_scales + 2 * (i * groups + group.index);
        const uint8_t* bytes = &from.values[(i * from.head_size + group.begin) / 2].codes;
        const float scale = widen(scales[0]), minimum = widen(scales[1]);
        if (group.count == kScaled) {
            Vec codes[2][kParts];
            load_codes(bytes, codes[0], codes[1]);
            for (int n = 0; n < 2; n++)
                for (int part = 0; part < kParts; part++)
                    store(v + (group.begin / kLanes + n) * kChunk * kLanes + part * kWidth,
                          codes[n][part] * broadcast(scale) + broadcast(minimum));
            return;
        }
        for (int64_t b = 0, half = group.half(); b < half; b++) {
            v[value_index(0, group.begin + b)] = float(bytes[b] & 15) * scale + minimum;
            v[value_index(0, group.begin + half + b)] = float(bytes[b] >> 4) * scale + minimum;
        }
    }
};

}  // namespace PENSTOCK_PATH
}  // namespace penstock
