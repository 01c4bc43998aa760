"""Tensor arithmetic: the only package, with `runner`, that knows devices.

In: tensors and plain numbers. Out: tensors. Files hold the meaning of ops as plain PyTorch, with its
tolerance; `cpu/` holds the bodies in C++. Ops know nothing of layers, models, sequences or requests.
"""

from __future__ import annotations

from penstock.ops import cpu
from penstock.ops.attention.attention import Shared, Work, attention
from penstock.ops.attention.block_move import block_move
from penstock.ops.attention.cache_move import cache_move
from penstock.ops.attention.cache_write import cache_write
from penstock.ops.attention.encoder_attention import encoder_attention
from penstock.ops.attention.inputs import single_inputs
from penstock.ops.attention.latent_attention import latent_attention
from penstock.ops.attention.latent_write import latent_move, latent_write
from penstock.ops.attention.qkv_attention import is_joined, qkv_attention
from penstock.ops.attention.qkv_write import qkv_write
from penstock.ops.attention.rope import rope
from penstock.ops.attention.tree_attention import Tail, tree_attention
from penstock.ops.elementwise import (
    activation,
    add,
    blank_rows,
    gated_activation,
    gather,
    local_ids,
    scale,
    softcap,
    take_columns,
)
from penstock.ops.embedding import embedding
from penstock.ops.experts.combine import combine, weigh
from penstock.ops.experts.grouped import grouped_matmul, grouped_packed_matmul
from penstock.ops.experts.grouped_product import (
    grouped_fp8_group_product,
    grouped_fp8_product,
    grouped_int_product,
    grouped_product,
)
from penstock.ops.experts.route import RouterRule, route
from penstock.ops.matmul.fp8_mlp import fp8_mlp
from penstock.ops.matmul.fp8_product import fp8_group_product, fp8_product
from penstock.ops.matmul.head_linear import head_linear, head_product, pack_heads
from penstock.ops.matmul.int_product import int_product
from penstock.ops.matmul.int_rows import int_rows
from penstock.ops.matmul.linear import PANEL, linear, pack_panels, unpack_panels
from penstock.ops.matmul.lora import LoraWeights, LowRank, Shift, Term, Whole, add_grouped_lora, add_lora, add_lora_rows
from penstock.ops.matmul.lora_stacks import AdapterRows, LoraStacks, add_lora_columns, add_lora_stacks
from penstock.ops.matmul.packed import FORMATS, Format, PackedWeight
from penstock.ops.matmul.packed_linear import packed_linear
from penstock.ops.matmul.packed_rows import packed_rows
from penstock.ops.matmul.product import product
from penstock.ops.norm import layer_norm, rms_norm
from penstock.ops.pooling import pooling
from penstock.ops.recurrent import causal_conv, state_scan
from penstock.ops.registry import OPS, Op, OpTable, op
from penstock.ops.sampling.choose import above, argmax, weight_sums
from penstock.ops.sampling.log_softmax import log_softmax
from penstock.ops.sampling.report import report
from penstock.ops.sampling.sample import sample

__all__ = [
    "FORMATS",
    "OPS",
    "PANEL",
    "AdapterRows",
    "Format",
    "LoraStacks",
    "LoraWeights",
    "LowRank",
    "Op",
    "OpTable",
    "PackedWeight",
    "RouterRule",
    "Shared",
    "Shift",
    "Tail",
    "Term",
    "Whole",
    "Work",
    "above",
    "activation",
    "add",
    "add_grouped_lora",
    "add_lora",
    "add_lora_columns",
    "add_lora_rows",
    "add_lora_stacks",
    "argmax",
    "attention",
    "blank_rows",
    "block_move",
    "cache_move",
    "cache_write",
    "causal_conv",
    "combine",
    "cpu",
    "embedding",
    "encoder_attention",
    "fp8_group_product",
    "fp8_mlp",
    "fp8_product",
    "gated_activation",
    "gather",
    "grouped_fp8_group_product",
    "grouped_fp8_product",
    "grouped_int_product",
    "grouped_matmul",
    "grouped_packed_matmul",
    "grouped_product",
    "head_linear",
    "head_product",
    "int_product",
    "int_rows",
    "is_joined",
    "latent_attention",
    "latent_move",
    "latent_write",
    "layer_norm",
    "linear",
    "local_ids",
    "log_softmax",
    "op",
    "pack_heads",
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
    "route",
    "sample",
    "scale",
    "single_inputs",
    "softcap",
    "state_scan",
    "take_columns",
    "tree_attention",
    "unpack_panels",
    "weigh",
    "weight_sums",
]
