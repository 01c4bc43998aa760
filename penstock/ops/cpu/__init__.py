"""CPU bodies: C++ kernels behind a C interface, bound by ctypes.

In: tensors whose data the kernels read in place. Out: new tensors (or a cache written in place). One file per op here
and in `csrc/`. All bodies are exact: the same row gives the same bits whatever else is in the call and however many
threads share it. Without the compiled library the references run instead.
"""

from __future__ import annotations

from penstock.ops.cpu import (
    activation,
    add,
    attention,
    cache_write,
    choose,
    embedding,
    encoder_attention,
    gather,
    layer_norm,
    linear,
    log_softmax,
    packed,
    qkv_write,
    rms_norm,
    rope,
    scale,
    softcap,
)
from penstock.ops.cpu.library import path, paths, use_path, using
from penstock.ops.cpu.threads import available_cores, num_threads, set_num_threads, torch_alone

__all__ = [
    "activation",
    "add",
    "attention",
    "available_cores",
    "cache_write",
    "choose",
    "embedding",
    "encoder_attention",
    "gather",
    "layer_norm",
    "linear",
    "log_softmax",
    "num_threads",
    "packed",
    "path",
    "paths",
    "qkv_write",
    "rms_norm",
    "rope",
    "scale",
    "set_num_threads",
    "softcap",
    "torch_alone",
    "use_path",
    "using",
]
