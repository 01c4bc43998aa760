"""The runtime under the CPU kernels: the compiled library, threads, arena and tape."""
