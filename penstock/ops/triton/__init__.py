"""Bodies for NVIDIA GPUs, in Triton, with cuBLAS for large matrix products. Importing this registers them.

Where a cache is kept on a GPU its keys lie like its values, [N, K, P, D] in memory, seen through strides as the ops
have them, [N, K, D, P].
"""

from __future__ import annotations

from penstock.ops.triton import (
    activation,
    add,
    attention,
    cache_write,
    encoder_attention,
    exact,
    fp8_mlp,
    fp8_product,
    inputs,
    int_product,
    int_rows,
    layer_norm,
    pooling,
    product,
    qkv_attention,
    qkv_write,
    report,
    rms_norm,
    rope,
    sample,
    scale,
    softcap,
)

__all__ = [
    "activation",
    "add",
    "attention",
    "cache_write",
    "encoder_attention",
    "exact",
    "fp8_mlp",
    "fp8_product",
    "inputs",
    "int_product",
    "int_rows",
    "layer_norm",
    "pooling",
    "product",
    "qkv_attention",
    "qkv_write",
    "report",
    "rms_norm",
    "rope",
    "sample",
    "scale",
    "softcap",
]
