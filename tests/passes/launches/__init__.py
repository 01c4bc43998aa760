"""Which kernels steps call, in order, as text that can be stored and compared.

On a CPU a runner takes the steps, and every kernel that it calls is noted. For a GPU the same steps are taken on the
meta device: what would be launched is noted, and nothing is compiled. Run `python -m tests.passes.launches --help`.

Triton must not have been told to interpret: run it in a process without TRITON_INTERPRET.
"""
