"""Tensor arithmetic: the only package, with `runner`, that knows devices.

In: tensors and plain numbers. Out: tensors. One file per op holds its meaning as plain PyTorch, its examples and its
tolerance; `cpu/` holds the bodies in C++. Ops know nothing of layers, models, sequences or requests.
"""

from __future__ import annotations

from penstock.ops import cpu
from penstock.ops.activation import activation, gated_activation
from penstock.ops.add import add
from penstock.ops.attention import Shared, Work, attention
from penstock.ops.cache_write import cache_write
from penstock.ops.choose import above, argmax, weight_sums
from penstock.ops.embedding import embedding
from penstock.ops.encoder_attention import encoder_attention
from penstock.ops.fp8_mlp import fp8_mlp
from penstock.ops.fp8_product import fp8_product
from penstock.ops.gather import gather
from penstock.ops.inputs import single_inputs
from penstock.ops.int_product import int_product
from penstock.ops.int_rows import int_rows
from penstock.ops.layer_norm import layer_norm
from penstock.ops.linear import PANEL, linear, pack_panels, unpack_panels
from penstock.ops.log_softmax import log_softmax
from penstock.ops.packed import FORMATS, Format, PackedWeight
from penstock.ops.packed_linear import packed_linear
from penstock.ops.packed_rows import packed_rows
from penstock.ops.pooling import pooling
from penstock.ops.product import product
from penstock.ops.qkv_attention import is_joined, qkv_attention
from penstock.ops.qkv_write import qkv_write
from penstock.ops.registry import OPS, Op, op, take_exact
from penstock.ops.report import report
from penstock.ops.rms_norm import rms_norm
from penstock.ops.rope import rope
from penstock.ops.sample import sample
from penstock.ops.scale import scale
from penstock.ops.softcap import softcap

__all__ = [
    "FORMATS",
    "OPS",
    "PANEL",
    "Format",
    "Op",
    "PackedWeight",
    "Shared",
    "Work",
    "above",
    "activation",
    "add",
    "argmax",
    "attention",
    "cache_write",
    "cpu",
    "embedding",
    "encoder_attention",
    "fp8_mlp",
    "fp8_product",
    "gated_activation",
    "gather",
    "int_product",
    "int_rows",
    "is_joined",
    "layer_norm",
    "linear",
    "log_softmax",
    "op",
    "pack_panels",
    "packed_linear",
    "packed_rows",
    "pooling",
    "product",
    "qkv_attention",
    "qkv_write",
    "report",
    "rms_norm",
    "rope",
    "sample",
    "scale",
    "single_inputs",
    "softcap",
    "take_exact",
    "unpack_panels",
    "weight_sums",
]
