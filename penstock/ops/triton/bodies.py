"""Register every GPU body."""

from __future__ import annotations

from penstock.ops.triton import elementwise, exact, norm, pooling
from penstock.ops.triton.attention import (
    attention,
    block_move,
    cache_write,
    encoder_attention,
    inputs,
    latent,
    qkv_attention,
    qkv_write,
    rope,
)
from penstock.ops.triton.experts import combine, grouped_fp8, grouped_ints, grouped_product, route
from penstock.ops.triton.matmul import (
    fp8_groups,
    fp8_mlp,
    fp8_product,
    head_product,
    int_product,
    int_rows,
    lora,
    product,
)
from penstock.ops.triton.sampling import report, sample

__all__ = [
    "attention",
    "block_move",
    "cache_write",
    "combine",
    "elementwise",
    "encoder_attention",
    "exact",
    "fp8_groups",
    "fp8_mlp",
    "fp8_product",
    "grouped_fp8",
    "grouped_ints",
    "grouped_product",
    "head_product",
    "inputs",
    "int_product",
    "int_rows",
    "latent",
    "lora",
    "norm",
    "pooling",
    "product",
    "qkv_attention",
    "qkv_write",
    "report",
    "rope",
    "route",
    "sample",
]
