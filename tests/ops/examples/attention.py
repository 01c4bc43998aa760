"""Examples of attention ops, and paged caches to make more of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock import ops
from penstock.ops.attention.attention import find_first
from penstock.ops.registry import Example
from tests.ops.examples.case import examples, integers, normal, permutation
from tests.ops.examples.rows import EachQuery, EachRow, EachSequence, EachSlot


def cache_pool(
    num_blocks: int, num_heads: int, size: int, head_size: int, dtype: torch.dtype, fill: float = 0
) -> dict[str, Tensor]:
    """New caches as the ops take them, blocks of keys and values side by side: for tests and examples."""
    if dtype is torch.uint8:
        return _int4_pool(num_blocks, num_heads, size, head_size, fill)
    pool = torch.full((num_blocks, 2, num_heads, size * head_size), fill if dtype.is_floating_point else 0).to(dtype)
    caches = {
        "k_cache": pool[:, 0].view(num_blocks, num_heads, head_size, size),
        "v_cache": pool[:, 1].view(num_blocks, num_heads, size, head_size),
    }
    if dtype is torch.int8:
        scales = torch.full((num_blocks, 2, num_heads, size), float(fill))
        caches |= {"k_scale": scales[:, 0], "v_scale": scales[:, 1]}
    return caches


def _int4_pool(num_blocks: int, num_heads: int, size: int, head_size: int, fill: float) -> dict[str, Tensor]:
    pool = torch.zeros(num_blocks, 2, num_heads, size * (head_size // 2), dtype=torch.uint8)
    groups = -(-head_size // 32)
    scales = torch.full((num_blocks, 2, num_heads, 2 * size * groups), float(fill), dtype=torch.float16)
    return {
        "k_cache": pool[:, 0].view(num_blocks, num_heads, head_size // 2, size),
        "v_cache": pool[:, 1].view(num_blocks, num_heads, size, head_size // 2),
        "k_scale": scales[:, 0].view(num_blocks, num_heads, groups, 2, size),
        "v_scale": scales[:, 1].view(num_blocks, num_heads, size, groups, 2),
    }


@examples(ops.rope, EachRow("x", "positions"))
def _rope() -> Iterator[Example]:
    shapes = [
        (0, 2, 8, 8),
        (1, 9, 64, 64),
        (5, 3, 80, 32),
        (13, 1, 6, 2),
        (7, 4, 96, 96),
        (3, 2, 30, 10),
        (70, 9, 64, 64),
    ]
    for seed, (num_tokens, num_heads, head_size, rotated) in enumerate(shapes):
        angles = normal(seed, 50, rotated // 2, scale=2.0)
        yield {
            "x": normal(seed + 100, num_tokens, num_heads, head_size),
            "positions": integers(seed, 50, num_tokens),
            "cos": angles.cos(),
            "sin": angles.sin(),
        }
    qkv = normal(50, 11, 5, 16)
    angles = normal(51, 20, 8)
    yield {"x": qkv[:, 1:4], "positions": integers(52, 20, 11), "cos": angles.cos(), "sin": angles.sin()}
    for x in (qkv, qkv[:, 2:, :], normal(53, 11, 3, 40)[:, :, 21:]):
        yield {"x": x, "positions": integers(52, 20, 11), "cos": angles.cos(), "sin": angles.sin(), "interleaved": True}


@examples(ops.cache_write, EachSlot("k", "v", "slots"))
def _cache_write() -> Iterator[Example]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8):
        shapes = [(0, 1, 8, 4), (1, 3, 64, 16), (13, 2, 20, 8), (110, 3, 64, 16)]
        for seed, (num_tokens, num_heads, size, block) in enumerate(shapes):
            yield {
                "k": normal(seed, num_tokens, num_heads, size),
                "v": normal(seed + 9, num_tokens, num_heads, size),
                **cache_pool(9, num_heads, block, size, dtype),
                "slots": permutation(seed, 9 * block)[:num_tokens],
            }
    qkv = normal(40, 5, 6, 12)
    caches = cache_pool(4, 2, 4, 12, torch.float32)
    yield {"k": qkv[:, 2:4], "v": qkv[:, 4:6], **caches, "slots": permutation(4, 16)[:5]}
    extremes = torch.tensor([0.0, 1e-42, 65519.0, 65520.0, -1e9, torch.inf, -torch.inf, torch.nan]).repeat(4, 5)
    extremes = torch.stack([extremes, torch.zeros(4, 40)], dim=1)
    extremes[1, :, 5:] = 1e-40
    for dtype in (torch.float16, torch.int8, torch.uint8):
        yield {"k": extremes, "v": extremes.flip(0), **cache_pool(3, 2, 16, 40, dtype), "slots": permutation(5, 48)[:4]}


def paged(
    seed: int,
    sequences: Sequence[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    **extra: object,
) -> Example:
    """A call for sequences given as (queries, length), their blocks scattered over a pool filled with noise."""
    counts, lengths = [c for c, _ in sequences], [n for _, n in sequences]
    width = max([-(-n // block) for n in lengths], default=0)
    num_blocks = sum(-(-n // block) for n in lengths) + 2
    free = iter(permutation(seed, num_blocks).tolist())
    table = torch.full((len(sequences), width), -1, dtype=torch.int32)
    for s, (count, length) in enumerate(sequences):
        first = int(find_first(torch.tensor(length - count), window)) // block if length else 0
        for b in range(first, -(-length // block)):
            table[s, b] = next(free)
    caches = cache_pool(num_blocks, num_kv_heads, block, head_size, dtype)
    k, v = (normal(seed + i, num_blocks * block, num_kv_heads, head_size) for i in (2, 3))
    ops.cache_write.reference(k, v, slots=torch.arange(num_blocks * block), **caches)
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    return {
        "q": normal(seed + 1, sum(counts), num_heads, head_size),
        **caches,
        "table": table,
        "query_start": starts,
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "scale": head_size**-0.5,
        "window": window,
        **extra,
    }


@examples(ops.attention, EachQuery())
def _attention() -> Iterator[Example]:
    yield paged(0, [], 2, 1, 8)
    yield paged(1, [(1, 1)], 9, 3, 64)
    yield paged(2, [(1, 130), (7, 7), (0, 5), (5, 64), (3, 200)], 9, 3, 64)
    yield paged(3, [(17, 31), (1, 65)], 4, 4, 20, block=8)
    yield paged(4, [(1, 63), (2, 129)], 2, 1, 256, block=32)
    yield paged(5, [(1, 150), (40, 90), (3, 3)], 4, 2, 16, window=33)
    yield paged(6, [(2, 100), (70, 70)], 3, 1, 80, softcap=20.0)
    yield paged(7, [(1, 77), (9, 12)], 6, 6, 24, block=1, alibi=torch.linspace(0.01, 0.5, 6))
    for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.uint8):
        size = 33 if dtype is not torch.uint8 else 34
        yield paged(8, [(1, 100), (13, 13), (2, 66)], 4, 2, size, dtype=dtype, window=50, softcap=30.0)
        yield paged(9, [(1, 700), (20, 40), (1, 3)], 9, 3, 64, dtype=dtype)
        yield paged(10, [(3, 300), (1, 64)], 5, 1, 96, block=32, dtype=dtype, alibi=torch.linspace(0.01, 0.5, 5))
        yield paged(11, [(9, 70), (50, 50)], 2, 2, 16, block=4, dtype=dtype)
    yield paged(12, [(1, 600)], 7, 1, 48, dtype=torch.float16, window=200)
    for dtype in (torch.float32, torch.bfloat16):  # a sink far below, among and far above the scores
        yield paged(13, [(1, 500), (20, 70)], 6, 2, 32, dtype=dtype, sinks=torch.linspace(-9, 40, 6))
        yield paged(14, [(1, 90), (7, 300)], 4, 1, 48, dtype=dtype, window=30, sinks=normal(14, 4))
        yield paged(15, [(1, 90), (150, 300), (5, 65), (4, 40)], 4, 1, 48, dtype=dtype, window=-32)
    yield paged(16, [(1, 130), (70, 140)], 6, 2, 24, block=8, window=-50)  # chunks end within blocks


@examples(ops.encoder_attention, EachSequence())
def _encoder_attention() -> Iterator[Example]:
    cases = [([], 2, 8), ([1], 12, 32), ([5, 0, 70, 13], 3, 20), ([130, 64, 1], 2, 64)]
    for seed, (counts, num_heads, size) in enumerate(cases):
        q, k, v = (normal(10 * seed + i, sum(counts), num_heads, size) for i in range(3))
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        yield {"q": q, "k": k, "v": v, "query_start": starts, "scale": size**-0.5}


def _qkv_write_call(
    seed: int,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    size: int,
    block: int,
    dtype: torch.dtype,
    rotated: int = 0,
    normed: str = "",
) -> Example:
    num_blocks = -(-num_tokens // block) + 2
    angles = normal(seed + 1, 50, rotated // 2, scale=2.0)
    example: Example = {
        "qkv": normal(seed, num_tokens, (num_heads + 2 * num_kv_heads) * size),
        **cache_pool(num_blocks, num_kv_heads, block, size, dtype),
        "slots": permutation(seed, num_blocks * block)[:num_tokens],
        "positions": integers(seed, 50, num_tokens),
        "eps": 1e-6,
    } | {f"{name}_norm": normal(seed + 2, size) for name in normed}
    return example | {"cos": angles.cos(), "sin": angles.sin()} if rotated else example


@examples(ops.qkv_write, EachSlot("qkv", "slots", "positions", "source"))
def _qkv_write() -> Iterator[Example]:
    yield _qkv_write_call(0, 0, 3, 1, 8, 4, torch.float32, rotated=8)
    yield _qkv_write_call(1, 1, 9, 3, 64, 16, torch.float16, rotated=64)
    yield _qkv_write_call(2, 7, 4, 1, 256, 16, torch.float16, rotated=256, normed="qk")
    yield _qkv_write_call(3, 5, 6, 2, 80, 8, torch.bfloat16, rotated=32, normed="q")
    yield _qkv_write_call(4, 70, 9, 3, 64, 16, torch.float32, rotated=64)
    yield _qkv_write_call(5, 13, 4, 4, 33, 1, torch.float16, normed="k")
    yield _qkv_write_call(6, 6, 4, 2, 20, 32, torch.float32)
    yield _qkv_write_call(7, 21, 8, 2, 64, 16, torch.int8, rotated=64, normed="qk")
    yield _qkv_write_call(8, 3, 2, 1, 30, 16, torch.int8, rotated=10)
    yield _qkv_write_call(11, 21, 8, 2, 64, 16, torch.uint8, rotated=64, normed="qk")
    yield _qkv_write_call(12, 3, 2, 1, 38, 4, torch.uint8, rotated=10)
    for seed, normed in ((9, ""), (10, "qk")):
        yield _qkv_write_call(seed, 7, 8, 2, 64, 16, torch.float32, rotated=64, normed=normed) | {
            "source": normal(seed, 7, 1500, scale=3.0),
            "source_eps": 1e-5,
        }


def _qkv_attention_call(
    seed: int,
    lengths: list[int],
    num_heads: int,
    num_kv_heads: int,
    size: int,
    rotated: int = 0,
    normed: str = "",
    source: int = 0,
    **extra: object,
) -> Example:
    example = paged(seed, [(1, length) for length in lengths], num_heads, num_kv_heads, size, **extra)  # type: ignore[arg-type]
    del example["q"], example["query_start"]
    block_size, positions = example["k_cache"].shape[3], example["lengths"].long() - 1
    blocks = example["table"].gather(1, (positions // block_size).unsqueeze(1)).squeeze(1).long()
    example |= {
        "qkv": normal(seed + 5, len(lengths), (num_heads + 2 * num_kv_heads) * size),
        "positions": positions,
        "slots": blocks * block_size + positions % block_size,
        "eps": 1e-6,
        "num_kv_splits": 1 + seed % 3,
    }
    example |= {f"{name}_norm": normal(seed + 6, size) for name in normed}
    if source:
        example |= {"source": normal(seed + 7, len(lengths), source, scale=3.0), "source_eps": 1e-5}
    if rotated:
        angles = normal(seed + 8, max(lengths), rotated // 2, scale=2.0)
        example |= {"cos": angles.cos(), "sin": angles.sin()}
    return {"qkv": example.pop("qkv"), **example}


@examples(ops.qkv_attention, EachSlot("qkv", "slots", "positions", "table", "lengths", "source"))
def _qkv_attention() -> Iterator[Example]:
    yield _qkv_attention_call(0, [1, 40, 17, 130], 9, 3, 64, rotated=64)
    yield _qkv_attention_call(1, [33, 200, 1], 4, 2, 128, rotated=128, normed="qk")
    yield _qkv_attention_call(2, [70, 5], 4, 1, 80, rotated=32, normed="q", window=33, block=8)
    yield _qkv_attention_call(3, [90, 64, 65], 4, 4, 33, normed="k", softcap=20.0)
    yield _qkv_attention_call(4, [77, 12], 6, 2, 24, alibi=torch.linspace(0.01, 0.5, 6), source=1500)
    yield _qkv_attention_call(11, [77, 12, 1], 4, 2, 16, rotated=16, window=40, sinks=torch.linspace(-3, 9, 4))
    for seed, dtype in ((5, torch.bfloat16), (6, torch.float16)):
        yield _qkv_attention_call(seed, [100, 31, 16, 48], 8, 2, 64, rotated=64, normed="qk", source=64, dtype=dtype)
        yield _qkv_attention_call(seed + 2, [700, 1], 2, 1, 256, rotated=256, dtype=dtype)


class _Written(EachRow):
    """What was written for each row."""

    def outputs(self, example: Example, result: object, keep: list[int]) -> Tensor:
        names = ("ids", "positions", "lengths") + (("step_table",) if example["slots"] is None else ("slots",))
        written = [example[name][keep].reshape(len(keep), -1) for name in names]
        return torch.cat([x.to(torch.int64) for x in written], dim=1)

    def count(self, example: Example) -> int:
        return int(example["numbers"].shape[1])

    def take(self, example: Example, keep: list[int]) -> Example:
        names = [name for name in ("ids", "positions", "lengths", "slots", "step_table") if example[name] is not None]
        some = {name: example[name][keep].clone() for name in names}
        return example | some | {"numbers": example["numbers"][:, keep].contiguous(), "table": example["table"].clone()}


@examples(ops.single_inputs, _Written("numbers"))
def _single_inputs() -> Iterator[Example]:
    sizes = [
        (1, 3, 5, 16, True),
        (4, 9, 40, 4, True),
        (7, 8, 300, 1, True),
        (3, 3, 2, 32, True),
        (5, 6, 197, 16, False),
    ]
    for seed, (num, num_rows, width, block, has_slots) in enumerate(sizes):
        numbers = torch.stack(
            [
                permutation(seed, num_rows)[:num],
                integers(seed + 1, 90, num) - 20,
                integers(seed + 2, width * block, num),
                integers(seed + 3, width, num),
                integers(seed + 4, 70, num),
            ]
        ).to(torch.int32)
        numbers[1].clamp_(min=-1)
        numbers[3, ::2] = -1
        if num > 2:
            numbers[2, 1] = -1
        yield {
            "numbers": numbers,
            "last": integers(seed + 5, 100, num_rows) - 1,
            "table": integers(seed + 6, 50, num_rows, width).to(torch.int32),
            "group": 0,
            "block_size": block,
            "ids": torch.zeros(num, dtype=torch.int64),
            "positions": torch.zeros(num, dtype=torch.int64),
            "lengths": torch.zeros(num, dtype=torch.int32),
            "slots": torch.zeros(num, dtype=torch.int64) if has_slots else None,
            "step_table": torch.full((num, width), -1, dtype=torch.int32),
        }


class _EachColumn(EachSlot):
    """Columns of the blocks, which are written in place."""

    def count(self, example: Example) -> int:
        return min(8, int(example["blocks"].shape[1]))

    def take(self, example: Example, keep: list[int]) -> Example:
        return example | {"blocks": example["blocks"][:, keep].contiguous()}

    def outputs(self, example: Example, result: object, keep: list[int]) -> Tensor:
        columns: Tensor = example["blocks"][:, keep].T
        return columns


@examples(ops.block_move, _EachColumn("blocks"))
def _block_move() -> Iterator[Example]:
    chains = [
        [],
        [(1, 3)],
        [(1, 3), (3, 0), (2, 1), (0, 2)],
        [(2, 2), (-1, 1), (0, 4)],
        [(i, 39 - i) for i in range(20)],
    ]
    for seed, (moves, width) in enumerate(zip(chains, (5, 1, 3000, 17, 1025))):
        yield {
            "blocks": integers(seed, 1000, 40, width).to(torch.int32),
            "moves": torch.tensor(moves, dtype=torch.int64).view(-1, 2),
        }
