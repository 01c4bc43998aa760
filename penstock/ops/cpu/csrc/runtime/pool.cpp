#include "runtime/pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#include "runtime/pause.h"

namespace penstock {
namespace {

constexpr int kMaxThreads = 256;
constexpr auto kSpin = std::chrono::microseconds(100);  // longer than the gap between two ops of one step

// A thread's run of items; threads that run out steal from the others.
struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
};

// One atomic word holds the job's number, whether workers may still join it, and how many have. A worker may come late
// or miss the job: the caller runs what is left and waits only for workers that joined. The mutex and the condition
// variables are used only by threads that have spun for long and go to sleep.
struct Pool {
    static constexpr uint64_t kJoined = 0xffff, kOpen = 0x10000;
    static constexpr int kNumber = 17;  // bits below the number of the job

    alignas(64) std::atomic<uint64_t> state{0};
    alignas(64) void (*body)(void*, int64_t) = nullptr;  // of the job; written while no worker can join
    void* context = nullptr;
    int threads = 1;
    Share shares[kMaxThreads];

    alignas(64) std::atomic<bool> taken{false};  // by a caller or a resize
    std::atomic<int> target{1};                  // number of threads, the caller included
    std::atomic<bool> oversubscribed{false};     // more threads than cores: spinning threads yield
    std::atomic<int> num_keep_awake{0};
    std::atomic<int> num_asleep{0};
    std::atomic<bool> caller_asleep{false};
    std::mutex mutex;
    std::condition_variable wake, done;
    bool alive[kMaxThreads] = {};  // guarded by the mutex

    uint64_t number() const { return state.load() >> kNumber; }
    bool has_workers() const { return (state.load(std::memory_order_acquire) & kJoined) != 0; }

    template <class Condition>
    bool spin_until(Condition condition, bool may_stay_awake) {
        auto end = std::chrono::steady_clock::now() + kSpin;
        for (;;) {
            for (int i = 0; i < 64; i++) {
                if (condition()) return true;
                if (oversubscribed.load(std::memory_order_relaxed)) std::this_thread::yield();
                else pause();
            }
            const auto now = std::chrono::steady_clock::now();
            if (may_stay_awake && num_keep_awake.load(std::memory_order_relaxed) > 0) end = now + kSpin;
            if (now >= end) return false;
        }
    }

    void work(int index) {
        for (uint64_t seen = 0;;) {
            await_change(seen);
            const uint64_t now = state.load(std::memory_order_acquire);
            seen = now >> kNumber;
            if (index >= target.load() && retire(index)) return;
            if (join(seen)) {
                take_items(index);
                leave();
            }
        }
    }

    void await_change(uint64_t seen) {
        while (!spin_until([&] { return state.load(std::memory_order_relaxed) >> kNumber != seen; }, true)) {
            std::unique_lock<std::mutex> lock(mutex);
            num_asleep.fetch_add(1);  // before checking again: whoever changes the state reads this afterwards
            wake.wait(lock, [&] { return number() != seen || num_keep_awake.load() > 0; });
            num_asleep.fetch_sub(1);
        }
    }

    void wake_workers() {
        if (num_asleep.load() == 0) return;
        {
            std::lock_guard<std::mutex> lock(mutex);
        }
        wake.notify_all();
    }

    bool join(uint64_t job) {
        uint64_t now = state.load(std::memory_order_acquire);
        while (now >> kNumber == job && (now & kOpen) != 0)
            if (state.compare_exchange_weak(now, now + 1, std::memory_order_acquire)) return true;
        return false;
    }

    void leave() {
        if (((state.fetch_sub(1) - 1) & (kOpen | kJoined)) != 0 || !caller_asleep.load()) return;
        {
            std::lock_guard<std::mutex> lock(mutex);
        }
        done.notify_one();
    }

    void take_items(int index) {
        for (int i = 0; i < threads; i++) {
            Share& share = shares[(index + i) % threads];
            while (share.next.load(std::memory_order_relaxed) < share.end) {
                const int64_t item = share.next.fetch_add(1, std::memory_order_relaxed);
                if (item < share.end) body(context, item);
            }
        }
    }

    void run(int64_t count, void (*function)(void*, int64_t), void* argument) {
        body = function;
        context = argument;
        threads = target.load(std::memory_order_relaxed);
        if (threads > count) threads = int(count);
        for (int i = 0; i < threads; i++) {
            shares[i].next.store(count * i / threads, std::memory_order_relaxed);
            shares[i].end = count * (i + 1) / threads;
        }
        state.store((number() + 1) << kNumber | kOpen);
        wake_workers();
        take_items(0);
        state.fetch_and(~kOpen);
        if (!has_workers() || spin_until([&] { return !has_workers(); }, false)) return;
        std::unique_lock<std::mutex> lock(mutex);
        caller_asleep.store(true);
        done.wait(lock, [&] { return (state.load() & kJoined) == 0; });
        caller_asleep.store(false);
    }

    bool retire(int index) {
        std::lock_guard<std::mutex> lock(mutex);
        if (index < target.load()) return false;
        alive[index] = false;
        return true;
    }

    int resize(int wanted) {
        while (taken.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
        wanted = wanted < 1 ? 1 : wanted > kMaxThreads ? kMaxThreads : wanted;
        {
            std::lock_guard<std::mutex> lock(mutex);
            target.store(wanted);
            for (int index = 1; index < target.load(); index++) {
                if (alive[index]) continue;
                try {
                    std::thread([this, index] { work(index); }).detach();
                    alive[index] = true;
                } catch (const std::system_error&) {
                    target.store(index);  // the system gives no more threads: use those that exist
                }
            }
            const unsigned cores = std::thread::hardware_concurrency();
            oversubscribed.store(cores != 0 && unsigned(target.load()) > cores);
        }
        state.store((number() + 1) << kNumber);  // so that surplus workers see it and end
        wake_workers();
        const int reached = target.load();
        taken.store(false, std::memory_order_release);
        return reached;
    }
};

Pool* instance = nullptr;  // never destroyed: workers may outlive main

Pool& pool() {
    static const bool made = [] {
        instance = new Pool;
        pthread_atfork(nullptr, nullptr, [] { instance = new Pool; });  // a forked child has no workers
        return true;
    }();
    (void)made;
    return *instance;
}

struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(data); }
};

}  // namespace

void run_items(int64_t count, void (*body)(void*, int64_t), void* context) {
    Pool& p = pool();
    if (count > 1 && p.target.load(std::memory_order_relaxed) > 1 &&
        !p.taken.exchange(true, std::memory_order_acquire)) {
        p.run(count, body, context);
        p.taken.store(false, std::memory_order_release);
        return;
    }
    for (int64_t item = 0; item < count; item++) body(context, item);
}

int num_threads() { return pool().target.load(std::memory_order_relaxed); }

KeepAwake::KeepAwake() {
    Pool& p = pool();
    p.num_keep_awake.fetch_add(1);
    p.wake_workers();
}

KeepAwake::~KeepAwake() { pool().num_keep_awake.fetch_sub(1); }

void* scratch(size_t bytes, int place) {
    static thread_local Buffer buffers[2];
    Buffer& buffer = buffers[place];
    if (bytes > buffer.size) {
        std::free(buffer.data);
        buffer.size = (bytes + 4095) / 4096 * 4096;
        buffer.data = std::aligned_alloc(64, buffer.size);
        if (buffer.data == nullptr) std::abort();
    }
    return buffer.data;
}

}  // namespace penstock

extern "C" __attribute__((visibility("default"))) int penstock_set_num_threads(int threads) {
    return penstock::pool().resize(threads);
}

extern "C" __attribute__((visibility("default"))) int penstock_num_threads() { return penstock::num_threads(); }
