#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

namespace penstock {
namespace {

constexpr int kMaxThreads = 256;
constexpr auto kSpin = std::chrono::microseconds(50);  // longer than the gap between two ops of one step

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

template <class Condition>
bool spin_until(Condition condition) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 64; i++) {
            if (condition()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// A worker may come late to a job or miss it: the caller does what is left itself and waits only for those that joined.
struct Pool {
    std::mutex callers;                 // one parallel job at a time
    std::mutex mutex;                   // guards what follows; the atomics are also read without it
    std::condition_variable wake, done;
    bool alive[kMaxThreads] = {};
    std::atomic<int> target{1};         // threads, the caller among them
    bool open = false;                  // the job takes workers
    std::atomic<uint64_t> number{0};    // of the job; also grows with every change of target
    std::atomic<int> joined{0};
    void (*body)(void*, int64_t) = nullptr;
    void* context = nullptr;
    int64_t count = 0;
    std::atomic<int64_t> next{0};

    void take_items() {
        for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(context, item);
    }

    void work(int index) {
        uint64_t seen = 0;
        for (;;) {
            spin_until([&] { return number.load(std::memory_order_acquire) != seen; });
            std::unique_lock<std::mutex> lock(mutex);
            wake.wait(lock, [&] { return number.load(std::memory_order_relaxed) != seen; });
            seen = number.load(std::memory_order_relaxed);
            if (index >= target) {
                alive[index] = false;
                return;
            }
            if (!open) continue;
            joined.fetch_add(1, std::memory_order_relaxed);
            lock.unlock();
            take_items();
            lock.lock();
            if (joined.fetch_sub(1, std::memory_order_release) == 1) done.notify_one();
        }
    }

    void run(int64_t items, void (*function)(void*, int64_t), void* argument) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            body = function;
            context = argument;
            count = items;
            next.store(0, std::memory_order_relaxed);
            open = true;
            number.fetch_add(1, std::memory_order_release);
        }
        wake.notify_all();
        take_items();
        std::unique_lock<std::mutex> lock(mutex);
        open = false;
        if (joined.load(std::memory_order_relaxed) == 0) return;
        lock.unlock();
        spin_until([&] { return joined.load(std::memory_order_acquire) == 0; });
        lock.lock();
        done.wait(lock, [&] { return joined.load(std::memory_order_relaxed) == 0; });
    }

    int resize(int threads) {
        std::lock_guard<std::mutex> caller(callers);
        std::lock_guard<std::mutex> lock(mutex);
        target = threads < 1 ? 1 : threads > kMaxThreads ? kMaxThreads : threads;
        for (int index = 1; index < target; index++) {
            if (alive[index]) continue;
            try {
                std::thread([this, index] { work(index); }).detach();
                alive[index] = true;
            } catch (const std::system_error&) {
                target = index;         // no more threads to be had: go on with those there are
            }
        }
        number.fetch_add(1, std::memory_order_release);
        wake.notify_all();
        return target;
    }
};

Pool* instance = nullptr;               // never destroyed: workers may outlive main

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
    if (count > 1 && p.target > 1) {
        std::unique_lock<std::mutex> caller(p.callers, std::try_to_lock);
        if (caller.owns_lock()) return p.run(count, body, context);
    }
    for (int64_t item = 0; item < count; item++) body(context, item);
}

int num_threads() { return pool().target; }

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
