// Threads shared by all kernels, and their working memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// Calls body(context, i) for every i in [0, count), on this thread and on idle workers, and returns when all are done.
// Each thread begins with its own run of neighbouring items and then helps the others; which thread takes which item
// is left open: items must write to places of their own.
void run_items(int64_t count, void (*body)(void* context, int64_t item), void* context);

int num_threads();

// While one exists, workers wait for items awake: for lists of calls that follow each other closely.
struct Vigil {
    Vigil();
    ~Vigil();
    Vigil(const Vigil&) = delete;
    Vigil& operator=(const Vigil&) = delete;
};

// At least this many bytes, 64-byte aligned, for the calling thread until its next call with the same place. Place 0 is
// a work item's own, place 1 the op's that hands items out.
void* scratch(size_t bytes, int place = 0);

}  // namespace penstock
