// Threads shared by all kernels, and their working memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// Calls body(context, i) for every i in [0, count), on this thread and on idle workers, and returns when all are done.
// Each thread starts with its own run of neighbouring items, then steals from the others. Any thread may take any item,
// so items must write to disjoint memory.
void run_items(int64_t count, void (*body)(void* context, int64_t item), void* context);

int num_threads();

// While one exists, idle workers spin instead of sleeping: for calls that follow each other closely, as on a tape.
struct KeepAwake {
    KeepAwake();
    ~KeepAwake();
    KeepAwake(const KeepAwake&) = delete;
    KeepAwake& operator=(const KeepAwake&) = delete;
};

// Gives at least this many bytes, 64-byte aligned, valid for the calling thread until its next call with the same
// place. Place 0 is for a work item, place 1 for the op that hands out items.
void* scratch(size_t bytes, int place = 0);

}  // namespace penstock
