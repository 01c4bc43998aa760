// Names the compiled paths that this machine can run, the best one last.
#if defined(PENSTOCK_ARM64) && defined(__linux__)
#include <sys/auxv.h>
#endif

extern "C" __attribute__((visibility("default"))) const char* penstock_paths() {
#if defined(PENSTOCK_X86)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "generic";
    // Without VNNI, wider registers gain little.
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        return "generic avx2 avx512";
    return "generic avx2";
#elif defined(PENSTOCK_ARM64) && defined(__linux__)  // untested on other systems
    constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP of the kernel's interface
    return (getauxval(AT_HWCAP) & kDotProducts) != 0 ? "generic neon" : "generic";
#else
    return "generic";
#endif
}
