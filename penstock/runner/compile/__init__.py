"""Compile Triton kernels ahead of the steps that need them, without opening the GPU."""
