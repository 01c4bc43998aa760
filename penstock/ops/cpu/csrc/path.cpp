// Which of the compiled paths this machine can run.

extern "C" __attribute__((visibility("default"))) const char* penstock_best_path() {
#ifdef PENSTOCK_HAS_AVX2
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "generic";
}
