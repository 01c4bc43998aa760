"""Hopper's kernel for prompt attention against the reference in float32, and inside a captured graph."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import penstock.ops.triton.bodies  # noqa: F401  registers the bodies
from penstock.ops.attention.attention import Work, attention
from penstock.ops.triton import launch, tuning
from penstock.ops.triton.attention import prefill
from penstock.ops.triton.attention.attention import tile_tokens
from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.models import DEVICE

SIZE, LONG = 128, 1 << 20
MAX_ERROR = {torch.bfloat16: 6e-3, torch.float16: 1e-3}  # of 16-bit operands, by norms of a sequence
Sequences = Sequence[tuple[int, int]]  # queries and length of each
CASES: dict[str, Sequences] = {
    "ragged": [(n, n) for n in (1, 17, 128, 129, 300, 1000, 77, 4, 640, 2049, 31, 32, 33, 127)],
    "chunks": [(1, 1), (7, 200), (130, 500), (512, 1024), (33, 1600), (129, 129), (1, 128), (64, 9000), (2, 4097)],
    "each length": [(n, n) for n in range(1, 301)],
    "each end": [(min(n, 1 + n % 40), n) for near in (128, 256, 384) for n in range(near - 18, near + 19)],
    "one": [(5, 5)],
    "many": [(40, 40 + 3 * s) for s in range(200)],
}


def _require_hopper() -> None:
    if DEVICE == "cpu" or prefill.hopper is None or not launch.is_hopper(torch.device("cuda", 0)):
        raise Skip("the kernel needs a Hopper GPU and Gluon")


@dataclass
class Prompts:
    """A step of prompts whose cache has NaN wherever nothing was written."""

    sequences: Sequences
    num_heads: int = 8
    num_kv_heads: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def make(self, num_tokens: int = 0, num_sequences: int = 0, width: int = 0) -> dict[str, Any]:
        """Arguments of attention, padded to these sizes; sequences that are padding have no queries and no length."""
        torch.manual_seed(self.seed)
        size, pages = self.block_size, [-(-n // self.block_size) for _, n in self.sequences]
        order = torch.randperm(sum(pages) + 5)
        pool = torch.full((len(order), 2, self.num_kv_heads, size, SIZE), float("nan"), dtype=self.dtype)
        table = torch.zeros(max(num_sequences, len(pages)), max(width, -(-max(pages) // 4) * 4), dtype=torch.int32)
        begin = 0
        for s, ((_, length), count) in enumerate(zip(self.sequences, pages)):
            blocks = order[begin : begin + count]
            table[s, :count] = blocks.int()
            written = torch.randn(count, 2, self.num_kv_heads, size, SIZE).to(self.dtype)
            if length % size:
                written[-1, :, :, length % size :] = float("nan")
            pool[blocks] = written
            begin += count
        counts = [count for count, _ in self.sequences]
        lengths = [length for _, length in self.sequences]
        padding = table.shape[0] - len(counts)
        starts = torch.tensor([0, *counts, *[0] * padding]).cumsum(0)
        q = torch.randn(max(num_tokens, sum(counts)), self.num_heads, SIZE).to(self.dtype)
        pool = pool.to(DEVICE)
        return {
            "q": q.to(DEVICE),
            "k_cache": pool[:, 0].transpose(2, 3),
            "v_cache": pool[:, 1],
            "table": table.to(DEVICE),
            "query_start": starts.int().to(DEVICE),
            "lengths": torch.tensor([*lengths, *[0] * padding], dtype=torch.int32, device=DEVICE),
            "scale": SIZE**-0.5,
        }

    def tiles(self) -> list[tuple[int, int]]:
        """In the order of the runner: what takes longest first."""
        each = tile_tokens(self.num_heads, self.num_kv_heads)
        tiles = [(s, first) for s, (count, _) in enumerate(self.sequences) for first in range(0, count, each)]
        return sorted(tiles, key=lambda tile: self.sequences[tile[0]][0] - self.sequences[tile[0]][1] - tile[1])

    def expected(self, given: dict[str, Any]) -> Tensor:
        """The reference in float32, of the sequences that have queries."""
        count, end = len(self.sequences), sum(count for count, _ in self.sequences)
        parts = {"q": given["q"][:end].float(), "query_start": given["query_start"][: count + 1]}
        return attention.reference(**given | parts | {name: given[name][:count] for name in ("table", "lengths")})

    def compare(self, found: Tensor, given: dict[str, Any]) -> float:
        """The worst sequence's error over what is tolerated."""
        expected, begin, worst = self.expected(given), 0, 0.0
        for count, _ in self.sequences:
            a, b = (x[begin : begin + count].double() for x in (found, expected))
            error = float((a - b).norm() / b.norm())
            worst, begin = max(worst, error if error == error else float("inf")), begin + count
        return worst / MAX_ERROR[self.dtype]


@contextmanager
def count_launches() -> Iterator[list[int]]:
    """Count the launches of Hopper's kernel."""
    used, launched = prefill.hopper.attend_tiles, [0]

    def attend(*args: Any) -> None:
        launched[0] += 1
        used(*args)

    prefill.hopper.attend_tiles = attend
    try:
        with (
            mock.patch.object(tuning, "HOPPER_GROUPS", (1, 2, 4, 8)),
            mock.patch.object(tuning, "HOPPER_DTYPES", (torch.bfloat16, torch.float16)),
        ):
            yield launched
    finally:
        prefill.hopper.attend_tiles = used


def _numbers(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _attend(prompts: Prompts, given: dict[str, Any], padding: int = 0, counted: bool = True) -> Tensor:
    """Attend with some padding tiles, of a sequence without queries; not `counted` they are not told apart."""
    tiles = prompts.tiles()
    work = Work(
        0,
        _numbers([*tiles, *[(len(prompts.sequences), 0)] * padding]),
        num_tiles=_numbers([len(tiles)]) if counted else None,
        longest=LONG,
    )
    with count_launches() as launched:
        out = attention.bodies["cuda"].function(**given, work=work)
    require(launched[0] == 1, "another kernel was launched")
    return out


@check([(name,) for name in CASES])
def hopper_prompts(name: str) -> Figures:
    """Whole prompts and chunks at the end of contexts, for 1, 2, 4 and 8 query heads per KV head, in both types; the
    same bits every time."""
    _require_hopper()
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float16):
        for group in (1, 2, 4, 8):
            prompts = Prompts(CASES[name], 2 * group, 2, dtype=dtype, seed=group)
            given = prompts.make()
            outs = [_attend(prompts, given, counted=group != 4 or bool(turn % 2)).clone() for turn in range(3)]
            worst = max(worst, prompts.compare(outs[0], given))
            require(worst < 1, f"group {group}, {dtype}: {worst:.3g} times what is tolerated")
            require(all(torch.equal(outs[0], other) for other in outs[1:]), "other bits in another run")
    return {"of what is tolerated": worst}


@check([(size,) for size in (32, 64, 128)])
def hopper_block_size(size: int) -> Figures:
    _require_hopper()
    worst = 0.0
    for name in ("ragged", "chunks"):
        prompts = Prompts(CASES[name], 32, 8, size)
        given = prompts.make()
        worst = max(worst, prompts.compare(_attend(prompts, given), given))
    require(worst < 1, f"{worst:.3g} times what is tolerated")
    return {"of what is tolerated": worst}


@check()
def hopper_padding_tiles() -> Figures:
    """They write nothing and keep nobody waiting, whether the kernel is told how many tiles have queries or not."""
    _require_hopper()
    worst = 0.0
    for counted in (True, False):
        for sequences in (CASES["ragged"], CASES["one"]):
            prompts = Prompts(sequences, 32, 8)
            given = prompts.make(num_sequences=len(sequences) + 3)
            worst = max(worst, prompts.compare(_attend(prompts, given, 320, counted), given))
            require(worst < 1, f"{worst:.3g} times what is tolerated")
    empty = Prompts([(5, 5)], 32, 8).make(num_tokens=64)
    empty["lengths"].zero_(), empty["query_start"].zero_()
    for count in (None, _numbers([0])):
        work = Work(0, _numbers([(0, 0)] * 320), num_tiles=count, longest=LONG)
        with count_launches() as launched:
            attention.bodies["cuda"].function(**empty, work=work)
        torch.cuda.synchronize()
        require(launched[0] == 1, "another kernel was launched")
    return {"of what is tolerated": worst}


@check()
def hopper_inside_a_graph() -> Figures:
    """A graph that was captured with padding alone computes whatever steps its inputs are then filled with."""
    _require_hopper()
    num_tokens, num_sequences, width, num_tiles, num_blocks = 2048, 65, 640, 128, 4096
    fixed = Prompts([(1, 1)], 32, 8).make(num_tokens, num_sequences, width)
    pool = torch.full((num_blocks, 2, 8, 16, SIZE), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    fixed |= {"k_cache": pool[:, 0].transpose(2, 3), "v_cache": pool[:, 1]}
    fixed["lengths"].zero_(), fixed["query_start"].zero_()
    tiles, count = _numbers([(0, 0)] * num_tiles), _numbers([0])
    work = Work(0, tiles, num_tiles=count)  # no longest: the step's tokens decide
    run = attention.bodies["cuda"].function
    with count_launches() as launched:
        run(**fixed, work=work)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(**fixed, work=work)
    require(launched[0] == 2, "another kernel was launched")
    worst, shuffled = 0.0, random.Random(1)
    for turn in range(6):
        sequences: list[tuple[int, int]] = []
        room = num_tokens
        while room > 3 and len(sequences) < (1, 64)[turn % 2]:
            queries = min(room, shuffled.choice((2, 31, 64, 129, 700)))
            sequences.append((queries, queries + shuffled.choice((0, 0, 17, 800))))
            room -= queries
        prompts = Prompts(sequences, 32, 8, seed=turn)
        given = prompts.make(num_tokens, num_sequences, width)
        blocks = len(given["k_cache"])
        require(blocks <= num_blocks, "the check's own pool is too small")
        pool.fill_(float("nan"))
        pool[:blocks, 0], pool[:blocks, 1] = given["k_cache"].transpose(2, 3), given["v_cache"]
        for name in ("q", "table", "query_start", "lengths"):
            fixed[name].copy_(given[name])
        real = prompts.tiles()
        tiles.copy_(_numbers([*real, *[(len(sequences), 0)] * (num_tiles - len(real))]))
        count.fill_(len(real))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        worst = max(worst, prompts.compare(out, given))
        require(worst < 1, f"step {turn}: {worst:.3g} times what is tolerated")
    return {"of what is tolerated": worst}
