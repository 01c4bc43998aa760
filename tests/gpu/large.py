"""Kernels at sizes that the ops' examples do not have, again and again, as recorded steps run them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import penstock.ops.triton.bodies  # noqa: F401  registers the bodies
from penstock import ops
from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.matmul.product import is_skinny
from penstock.ops.triton.attention.attention import tile_tokens
from penstock.ops.triton.matmul import cublas
from penstock.runner.cuda.decode_batch import SharedPrefix, fill_shared, max_tiles
from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.models import DEVICE

ROUNDS = 20
TOLERANCE = 2e-2


def _normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16()


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, of all values together; NaN never passes."""
    a, b = found.double(), expected.double()
    value = float((a - b).norm() / b.norm())
    require(value <= TOLERANCE, f"off by {value:.3g}")
    return value


@check(
    [
        (2, 4096, 1024, 1e-5, False),
        (17, 6144, 4096, 1e-5, False),
        (32, 4096, 4096, 0.0, False),
        (32, 4096, 14336, 0.0, False),
        (2, 6144, 1024, 1e-6, True),
        (32, 6144, 1024, 1e-6, True),
    ]
)
def few_rows(num_rows: int, num_out: int, width: int, eps: float, gated: bool) -> Figures:
    if DEVICE == "cpu":
        raise Skip("kernels need a GPU")
    x, weight = _normal(num_rows, width), _normal(num_out, width, scale=width**-0.5)
    require(is_skinny(x, weight, None), "another kernel is taken")
    residual = None if eps else _normal(num_rows, num_out)
    epilogue = Epilogue(None, "silu" if gated else None, gated, residual)
    expected = ops.product.reference(x, weight, epilogue, None, eps)
    given = epilogue._replace(residual=None if residual is None else residual.clone())
    return {"off by": _apart(ops.product(x, weight, given, None, eps), expected)}


@check([(32, 256, 2048, 70), (16, 256, 2048, 70), (16, 33, 256, 1), (32, 5, 512, 300)])
def a_prefix_in_common_beside_the_rest(num_heads: int, num_sequences: int, common: int, own: int) -> Figures:
    """The two kernels run side by side: nothing may be read before both have ended."""
    if DEVICE == "cpu":
        raise Skip("kernels need a GPU")
    kv_heads, size, block = 8, 128, 16
    ahead, rest = common // block, -(-own // block)
    pool = _normal(ahead + num_sequences * rest, 2, kv_heads, block, size)
    order = torch.randperm(len(pool), device=DEVICE).to(torch.int32)
    table = torch.cat([order[:ahead].expand(num_sequences, ahead), order[ahead:].view(num_sequences, rest)], 1)
    step = tile_tokens(num_heads, kv_heads)
    members, skips = (np.zeros(num_sequences, dtype=np.int32) for _ in range(2))
    tiles = np.zeros((max_tiles(num_sequences, step), 4), dtype=np.int32)
    fill_shared([SharedPrefix(tuple(range(num_sequences)), common)], step, members, skips, tiles)
    sent = [torch.from_numpy(part).to(DEVICE) for part in (members, skips, tiles)]
    shared = ops.Shared(sent[0], sent[1], sent[2], 2)
    starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((num_sequences,), common + own, dtype=torch.int32, device=DEVICE)
    queries = [_normal(num_sequences, num_heads, size) for _ in range(ROUNDS)]
    caches = pool[:, 0].transpose(2, 3), pool[:, 1]

    def attend(q: torch.Tensor, way: ops.Shared | None) -> torch.Tensor:
        return ops.attention(q, *caches, table, starts, lengths, size**-0.5, work=ops.Work(num_sequences, None, 1, way))

    expected = [attend(q, None) for q in queries]
    attend(queries[0], shared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [attend(q, shared) for q in queries]
    graph.replay()
    return {"off by": max(_apart(a, b) for a, b in zip(found, expected))}


@check([(32, 32, False), (16, 32, True), (16, 2, True), (8, 9, False)])
def queries_made_and_used(num_heads: int, num_sequences: int, normed: bool) -> Figures:
    """One kernel, and the two that do the same one after the other."""
    if DEVICE == "cpu":
        raise Skip("kernels need a GPU")
    kv_heads, size, block, width = 8, 128, 16, 20
    pool = _normal(num_sequences * width, 2, kv_heads, block, size)
    table = torch.randperm(len(pool), device=DEVICE).view(num_sequences, width).to(torch.int32)
    lengths = torch.randint(1, width * block + 1, (num_sequences,), device=DEVICE, dtype=torch.int32)
    positions = lengths.long() - 1
    slots = table.gather(1, (positions // block).unsqueeze(1)).squeeze(1).long() * block + positions % block
    angles = torch.randn(width * block, size // 2, device=DEVICE)
    norm = torch.rand(size, device=DEVICE) + 0.5 if normed else None
    cos, sin = angles.cos(), angles.sin()
    starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=DEVICE)
    worst = 0.0
    for parts in (1, 4):
        qkv = _normal(num_sequences, (num_heads + 2 * kv_heads) * size)
        one, other = ((copy[:, 0].transpose(2, 3), copy[:, 1]) for copy in (pool.clone(), pool.clone()))
        q = ops.qkv_write(qkv, *one, slots, positions, norm, norm, 1e-6, cos, sin)
        expected = ops.attention(q, *one, table, starts, lengths, size**-0.5, work=ops.Work(num_sequences, None, parts))
        found = ops.qkv_attention(
            qkv,
            *other,
            slots,
            positions,
            table,
            lengths,
            size**-0.5,
            0,
            0.0,
            None,
            norm,
            norm,
            1e-6,
            cos,
            sin,
            num_kv_splits=parts,
        )
        worst = max(worst, _apart(found, expected), *(_apart(b, a) for a, b in zip(one, other)))
    return {"off by": worst}


@check([(4096, 6144, 4096), (5000, 28672, 4096)])
def many_rows(num_rows: int, num_out: int, width: int) -> Figures:
    if DEVICE == "cpu":
        raise Skip("kernels need a GPU")
    x, weight = _normal(num_rows, width), _normal(num_out, width, scale=width**-0.5)
    size = cublas.GemmSize(num_rows, num_out, width, x.dtype, x.device)
    return {
        "off by": _apart(cublas.gemm(x, weight), torch.mm(x, weight.t())),
        "not torch's": cublas.find_algorithm(size) is not None,
    }


@check([(8, 64, "float32", False), (4, 128, "float32", True), (4, 128, "bfloat16", True), (8, 64, "float16", False)])
def eight_bit_keys_among_nan(num_heads: int, size: int, name: str, normed: bool) -> Figures:
    """Nothing may come of what lies in a block beyond the last key: NaN, as other bytes of a memory often are."""
    if DEVICE == "cpu" or torch.cuda.get_device_capability() < (8, 9):
        raise Skip("no GPU with 8-bit floats")
    dtype, kv_heads, block, width, lengths = getattr(torch, name), 2, 16, 20, [5, 42, 79, 116, 153, 190, 227, 264, 301]
    pool = torch.full((len(lengths) * width, 2, kv_heads, block, size), torch.nan, device=DEVICE)
    table = torch.randperm(len(pool), device=DEVICE).view(len(lengths), width).to(torch.int32)
    for row, length in zip(table.tolist(), lengths):
        for at in range(length - 1):
            pool[row[at // block], :, :, at % block] = torch.randn(2, kv_heads, size, device=DEVICE)
    ends = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    positions = ends.long() - 1
    slots = table.gather(1, (positions // block).unsqueeze(1)).squeeze(1).long() * block + positions % block
    qkv = torch.randn(len(lengths), (num_heads + 2 * kv_heads) * size, device=DEVICE).to(dtype)
    source = torch.randn(len(lengths), 256, device=DEVICE).to(dtype) if normed and dtype == torch.bfloat16 else None
    angles = torch.randn(width * block, size // 2, device=DEVICE)
    norm = torch.rand(size, device=DEVICE) + 0.5 if normed else None
    after: Any = (
        size**-0.5,
        0,
        0.0,
        None,
        norm,
        norm,
        1e-6,
        angles.cos(),
        angles.sin(),
        source,
        1e-6 if normed else 0.0,
        8,
    )
    found = []
    for way in (ops.qkv_attention, ops.qkv_attention.reference):
        copy = pool.to(torch.float8_e4m3fn)
        given = copy[:, 0].transpose(2, 3), copy[:, 1]
        found.append(way(qkv, *given, slots, positions, table, ends, *after))
    return {"off by": _apart(*found)}
