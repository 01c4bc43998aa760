// Replays a tape: kernel calls made one after the other without returning to Python.
#include <cstdint>

#include "runtime/pool.h"

using Call = int32_t (*)(const uint64_t* words);

// Words of call i begin at words[begins[i]]. Returns 0, or 1 + the index of the first call that failed.
extern "C" __attribute__((visibility("default"))) int64_t penstock_replay(int64_t count, const Call* calls,
                                                                          const int64_t* begins,
                                                                          const uint64_t* words) {
    const penstock::KeepAwake keep_awake;
    for (int64_t i = 0; i < count; i++)
        if (calls[i](words + begins[i]) != 0) return i + 1;
    return 0;
}
