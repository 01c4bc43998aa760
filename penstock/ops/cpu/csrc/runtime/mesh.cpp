// The segment: a header, and two slots per rank, which meetings use in turn.
//
// A rank holds a lock on its own byte of the segment's file as long as it lives, whatever ends it. Who waits spins for
// a moment, then sleeps, and looks from time to time whether the rank it waits for still holds its lock.
#include "runtime/mesh.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "runtime/pause.h"

namespace penstock {
namespace {

constexpr int kMaxRanks = 64;
constexpr int64_t kSpinNs = 20'000;      // about what a rank is behind another
constexpr int64_t kYieldNs = 80'000;     // more ranks than cores: the other may need this one
constexpr int64_t kLookNs = 20'000'000;  // between two looks whether a rank lives
enum Failure : uint32_t { kNone, kDead, kLate, kClosed };

struct alignas(64) Counter {
    std::atomic<uint64_t> value;
};

struct Header {
    alignas(64) std::atomic<uint32_t> bell;  // rung whenever something has changed
    std::atomic<uint32_t> sleepers;
    std::atomic<uint32_t> failure;  // 256 · rank + Failure of the first that failed
    Counter arrived[kMaxRanks];     // meetings that each rank has come to
};

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

struct flock byte_lock(int64_t rank) {
    struct flock lock;
    std::memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = off_t(rank);
    lock.l_len = 1;
    return lock;
}

int64_t round_up(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

thread_local uint32_t last_failure = kNone;  // of this thread's last call that failed

}  // namespace

struct Mesh {
    char* base;
    int rank, size, file;
    int64_t slot_bytes, timeout_ns;
    uint64_t phase = 0;  // meetings so far
    std::atomic<bool> closed{false};

    Header& header() const { return *reinterpret_cast<Header*>(base); }
    char* slot(int64_t of, uint64_t meeting) const {
        return base + round_up(sizeof(Header)) + (2 * of + int64_t(meeting & 1)) * slot_bytes;
    }
    void ring() {
        header().bell.fetch_add(1);
        if (header().sleepers.load() == 0) return;
#if defined(__linux__)
        syscall(SYS_futex, &header().bell, FUTEX_WAKE, kMaxRanks, nullptr, nullptr, 0);
#endif
    }

    template <class Condition>
    void sleep(const Condition& condition) {
        Header& h = header();
        h.sleepers.fetch_add(1);  // before checking again: whoever changes something reads this afterwards
        const uint32_t heard = h.bell.load();
        if (!condition()) {
            timespec wait{0, kLookNs};
#if defined(__linux__)
            syscall(SYS_futex, &h.bell, FUTEX_WAIT, heard, &wait, nullptr, 0);
#else
            (void)heard;
            wait.tv_nsec = 50'000;
            nanosleep(&wait, nullptr);
#endif
        }
        h.sleepers.fetch_sub(1);
    }

    bool is_alive(int64_t other) const {
        struct flock lock = byte_lock(other);
        return other == rank || fcntl(file, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
    }

    int32_t fail(Failure why, int64_t other) {
        uint32_t none = kNone;
        header().failure.compare_exchange_strong(none, uint32_t(256 * other + why));
        last_failure = header().failure.load();
        ring();
        return kMeshFailed;
    }

    // Waits until condition(other) holds for every rank.
    template <class Condition>
    int32_t wait_for_all(const Condition& condition) {
        const int64_t begin = now_ns();
        int64_t next_look = begin + kLookNs;
        for (int64_t other = 0; other < size; other++) {
            const auto done = [&] { return condition(other); };
            for (int64_t i = 1; !done(); i++) {
                if (closed.load(std::memory_order_relaxed)) return fail(kClosed, rank);
                if (header().failure.load(std::memory_order_relaxed) != kNone) return fail(kNone, other);
                pause();
                if (i % 64 != 0) continue;
                const int64_t now = now_ns(), waited = now - begin;
                if (waited < kSpinNs) continue;
                if (waited < kYieldNs) {
                    sched_yield();
                    continue;
                }
                if (now >= next_look) {
                    next_look = now + kLookNs;
                    if (!is_alive(other) && !done()) return fail(kDead, other);
                    if (waited > timeout_ns) return fail(kLate, other);
                }
                sleep(done);
                i = 63;  // look at the clock after the next check
            }
        }
        return 0;
    }
};

int mesh_rank(const Mesh* mesh) { return mesh->rank; }
int mesh_size(const Mesh* mesh) { return mesh->size; }
int64_t mesh_slot_bytes(const Mesh* mesh) { return mesh->slot_bytes; }

char* mesh_own_slot(Mesh* mesh) { return mesh->slot(mesh->rank, mesh->phase); }
const char* mesh_slot(const Mesh* mesh, int64_t rank) { return mesh->slot(rank, mesh->phase - 1); }

// A slot is written again two meetings later: by then every rank has come to the meeting between, so has read it.
int32_t mesh_meet(Mesh* mesh) {
    const uint64_t wanted = ++mesh->phase;
    Header& header = mesh->header();
    header.arrived[mesh->rank].value.store(wanted);
    mesh->ring();
    return mesh->wait_for_all(
        [&](int64_t other) { return header.arrived[other].value.load(std::memory_order_acquire) >= wanted; });
}

}  // namespace penstock

#define VISIBLE extern "C" __attribute__((visibility("default")))

VISIBLE int64_t penstock_mesh_bytes(int64_t size, int64_t slot_bytes) {
    if (size < 1 || size > penstock::kMaxRanks) return -1;
    return penstock::round_up(sizeof(penstock::Header)) + 2 * size * slot_bytes;
}

// Maps the segment in `file` and locks this rank's byte; null if either fails. A mesh is never freed: tapes name it.
VISIBLE penstock::Mesh* penstock_mesh_open(int32_t file, int64_t rank, int64_t size, int64_t slot_bytes,
                                           int64_t timeout_ms) {
    struct flock lock = penstock::byte_lock(rank);
    if (fcntl(file, F_SETLK, &lock) != 0) return nullptr;
    const size_t bytes = size_t(penstock_mesh_bytes(size, slot_bytes));
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (base == MAP_FAILED) return nullptr;
    auto* mesh = new penstock::Mesh;
    mesh->base = static_cast<char*>(base);
    mesh->rank = int(rank);
    mesh->size = int(size);
    mesh->file = file;
    mesh->slot_bytes = slot_bytes;
    mesh->timeout_ns = timeout_ms * 1'000'000;
    return mesh;
}

VISIBLE int32_t penstock_mesh_is_alive(const penstock::Mesh* mesh, int64_t rank) { return mesh->is_alive(rank); }

// From now on calls on this mesh fail, and so do those of ranks that wait for it.
VISIBLE void penstock_mesh_close(penstock::Mesh* mesh) {
    if (mesh->closed.exchange(true)) return;
    mesh->fail(penstock::kClosed, mesh->rank);
    const size_t bytes = size_t(penstock_mesh_bytes(mesh->size, mesh->slot_bytes));
    // A call may be under way: it goes on in pages of its own, and finds that the mesh is closed.
    mmap(mesh->base, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

// 256 · rank + 1: that rank died; + 2: it did not come in time; + 3: it closed the mesh.
VISIBLE int32_t penstock_mesh_failure() { return int32_t(penstock::last_failure); }
