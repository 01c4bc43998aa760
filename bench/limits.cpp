// What this machine can do at most: bytes read per second, float and integer operations per second.
//
//   limits THREADS SECONDS PATH MEGABYTES...
//
// PATH is avx2 or native: which instructions may be used. One JSON object is written to standard output. Each figure is
// the best of several passes of all threads together; a pass is timed from the first thread's start to the last one's
// end.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Work = void (*)(const uint8_t *data, size_t bytes, long rounds);

constexpr int NUM_SUMS = 10;            // independent chains: more than latency times throughput; all fit 16 registers
constexpr long ROUNDS = 1 << 16;
volatile int64_t sink;

__attribute__((target("avx2"))) void read_bytes(const uint8_t *data, size_t bytes, long rounds) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (long round = 0; round < rounds; ++round) {
        for (size_t i = 0; i + 256 <= bytes; i += 256) {
            const __m256i *p = reinterpret_cast<const __m256i *>(data + i);
            a = _mm256_xor_si256(a, _mm256_xor_si256(_mm256_load_si256(p), _mm256_load_si256(p + 1)));
            b = _mm256_xor_si256(b, _mm256_xor_si256(_mm256_load_si256(p + 2), _mm256_load_si256(p + 3)));
            c = _mm256_xor_si256(c, _mm256_xor_si256(_mm256_load_si256(p + 4), _mm256_load_si256(p + 5)));
            d = _mm256_xor_si256(d, _mm256_xor_si256(_mm256_load_si256(p + 6), _mm256_load_si256(p + 7)));
        }
        __asm__ volatile("" ::: "memory");
    }
    a = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
    sink = _mm256_extract_epi64(a, 0);
}

// Each body below does NUM_SUMS vector operations per round. The empty asm keeps the compiler from folding the loop.

__attribute__((target("avx2,fma"))) void fma_avx2(const uint8_t *, size_t, long rounds) {
    __m256 sums[NUM_SUMS], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(0.001f);
#pragma GCC unroll 16
    for (auto &sum : sums) sum = y;
    for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
        for (auto &sum : sums) {
            sum = _mm256_fmadd_ps(sum, x, y);
            __asm__ volatile("" : "+x"(sum));
        }
    }
#pragma GCC unroll 16
    for (auto &sum : sums) sink = static_cast<int64_t>(_mm256_cvtss_f32(sum));
}

// The exact dot product that AVX2 has: 32 products of bytes into 16-bit pairs, those into 32-bit sums.
__attribute__((target("avx2"))) void dot_avx2(const uint8_t *, size_t, long rounds) {
    __m256i sums[NUM_SUMS], x = _mm256_set1_epi8(3), y = _mm256_set1_epi8(5), ones = _mm256_set1_epi16(1);
#pragma GCC unroll 16
    for (auto &sum : sums) sum = y;
    for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
        for (auto &sum : sums) {
            __asm__ volatile("" : "+x"(y));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), ones));
            __asm__ volatile("" : "+x"(sum));
        }
    }
#pragma GCC unroll 16
    for (auto &sum : sums) sink = _mm256_extract_epi64(sum, 0);
}

__attribute__((target("avx512f"))) void fma_avx512(const uint8_t *, size_t, long rounds) {
    __m512 sums[NUM_SUMS], x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(0.001f);
#pragma GCC unroll 16
    for (auto &sum : sums) sum = y;
    for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
        for (auto &sum : sums) {
            sum = _mm512_fmadd_ps(sum, x, y);
            __asm__ volatile("" : "+v"(sum));
        }
    }
#pragma GCC unroll 16
    for (auto &sum : sums) sink = static_cast<int64_t>(_mm512_cvtss_f32(sum));
}

__attribute__((target("avx512f,avx512vnni"))) void dot_vnni(const uint8_t *, size_t, long rounds) {
    __m512i sums[NUM_SUMS], x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(5);
#pragma GCC unroll 16
    for (auto &sum : sums) sum = y;
    for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
        for (auto &sum : sums) {
            sum = _mm512_dpbusd_epi32(sum, x, y);
            __asm__ volatile("" : "+v"(sum));
        }
    }
#pragma GCC unroll 16
    for (auto &sum : sums) sink = _mm256_extract_epi64(_mm512_castsi512_si256(sum), 0);
}

// Seconds that all threads together take for one pass.
double pass(Work work, const std::vector<uint8_t *> &data, size_t bytes, long rounds) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<std::thread> threads;
    for (uint8_t *part : data) {
        threads.emplace_back([&, part] {
            ++ready;
            while (!go) {
            }
            work(part, bytes, rounds);
        });
    }
    while (ready < static_cast<int>(data.size())) {
    }
    const auto start = Clock::now();
    go = true;
    for (auto &thread : threads) thread.join();
    return std::chrono::duration<double>(Clock::now() - start).count();
}

double best(Work work, const std::vector<uint8_t *> &data, size_t bytes, long rounds, double seconds) {
    const auto start = Clock::now();
    double shortest = 1e30;
    do {
        shortest = std::min(shortest, pass(work, data, bytes, rounds));
    } while (std::chrono::duration<double>(Clock::now() - start).count() < seconds);
    return shortest;
}

double giga_operations(Work work, int threads, double per_round, double seconds) {
    const std::vector<uint8_t *> nothing(threads, nullptr);
    return per_round * NUM_SUMS * ROUNDS * threads / best(work, nothing, 0, ROUNDS, seconds) / 1e9;
}

// `megabytes` are read by all threads together, again and again: what fits a cache is read from there.
double read_speed(int threads, size_t megabytes, double seconds) {
    const size_t bytes = std::max<size_t>(megabytes * 1000000 / threads & ~size_t{4095}, 4096);
    std::vector<uint8_t *> data;
    for (int i = 0; i < threads; ++i) {
        data.push_back(static_cast<uint8_t *>(std::aligned_alloc(4096, bytes)));
        if (!data.back()) std::exit(2);
        std::memset(data.back(), i + 1, bytes);
    }
    const long rounds = std::max<long>(1, 64000000 / static_cast<long>(bytes));
    pass(read_bytes, data, bytes, rounds);
    const double speed = 1e-9 * bytes * rounds * threads / best(read_bytes, data, bytes, rounds, seconds);
    for (uint8_t *part : data) std::free(part);
    return speed;
}

void print_reads(const char *name, int threads, const std::vector<size_t> &sizes, double seconds) {
    std::printf("  \"%s\": {", name);
    for (size_t i = 0; i < sizes.size(); ++i)
        std::printf("%s\"%zu\": %.2f", i ? ", " : "", sizes[i], read_speed(threads, sizes[i], seconds));
    std::printf("},\n");
}

}  // namespace

int main(int argc, char **argv) {
    if (argc < 5) {
        std::fprintf(stderr, "usage: limits THREADS SECONDS avx2|native MEGABYTES...\n");
        return 1;
    }
    const int threads = std::max(1, std::atoi(argv[1]));
    const double seconds = std::atof(argv[2]);
    const bool native = std::string(argv[3]) == "native";
    std::vector<size_t> sizes;
    for (int i = 4; i < argc; ++i) sizes.push_back(std::strtoull(argv[i], nullptr, 10));
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        std::fprintf(stderr, "this CPU has no AVX2\n");
        return 3;
    }
    std::printf("{\n");
    print_reads("read_gb_per_s", threads, sizes, seconds);
    print_reads("read_gb_per_s_one_thread", 1, sizes, seconds);
    std::printf("  \"fma_avx2_gflop_per_s\": %.1f,\n", giga_operations(fma_avx2, threads, 2 * 8, seconds));
    if (native && __builtin_cpu_supports("avx512f"))
        std::printf("  \"fma_avx512_gflop_per_s\": %.1f,\n", giga_operations(fma_avx512, threads, 2 * 16, seconds));
    if (native && __builtin_cpu_supports("avx512vnni"))
        std::printf("  \"dot_vnni_gop_per_s\": %.1f,\n", giga_operations(dot_vnni, threads, 2 * 64, seconds));
    std::printf("  \"dot_avx2_gop_per_s\": %.1f\n}\n", giga_operations(dot_avx2, threads, 2 * 32, seconds));
    return 0;
}
