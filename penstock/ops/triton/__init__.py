"""Bodies for NVIDIA GPUs, in Triton, with cuBLAS for large matrix products. Importing `bodies` registers them.

A GPU stores keys like values, [N, K, P, D] in memory; ops see them as [N, K, D, P] through strides.
"""
