"""CPU bodies: C++ kernels behind a C interface, bound by ctypes.

In: tensors, which the kernels read in place. Out: new tensors, or a cache written in place. Files here and in `csrc/`
bear the names of the ops. All bodies are exact: a row gives the same bits whatever else is in the call and however many
threads share it, and a fused op the bits of the ops it joins. Without the compiled library the references run.
"""

from __future__ import annotations

from penstock.ops.cpu import elementwise, embedding, norm
from penstock.ops.cpu.attention import (
    attention,
    block_move,
    cache_move,
    cache_write,
    encoder_attention,
    latent,
    qkv_write,
    rope,
)
from penstock.ops.cpu.experts import grouped, route
from penstock.ops.cpu.matmul import head_linear, linear, lora, packed
from penstock.ops.cpu.runtime.library import override_path, path, paths, use_path
from penstock.ops.cpu.runtime.threads import available_cores, limit_torch, num_threads, set_num_threads
from penstock.ops.cpu.sampling import choose, log_softmax

__all__ = [
    "attention",
    "available_cores",
    "block_move",
    "cache_move",
    "cache_write",
    "choose",
    "elementwise",
    "embedding",
    "encoder_attention",
    "grouped",
    "head_linear",
    "latent",
    "limit_torch",
    "linear",
    "log_softmax",
    "lora",
    "norm",
    "num_threads",
    "override_path",
    "packed",
    "path",
    "paths",
    "qkv_write",
    "rope",
    "route",
    "set_num_threads",
    "use_path",
]
