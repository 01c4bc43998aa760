"""Examples of the ops of latent attention, and paged caches of latents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock import ops
from penstock.ops.registry import Example
from tests.ops.examples.attention import paged
from tests.ops.examples.case import examples, normal, permutation
from tests.ops.examples.rows import EachNode, EachRow, EachRowInPlace
from tests.ops.examples.trees import BUSH, LINE, with_trees

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def paged_latents(
    seed: int,
    sequences: Sequence[tuple[int, int]],
    num_heads: int,
    sizes: tuple[int, int],
    block: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Example:
    """A call for sequences given as (queries, length); sizes are the numbers of a value, and those after them."""
    rank, rope = sizes
    given = paged(seed, sequences, num_heads, 1, 8, block)
    num_blocks, num_tokens = given["k_cache"].shape[0], given["q"].shape[0]
    pool = normal(seed + 2, num_blocks, 2, block * (rank + rope)).to(dtype)
    return {
        "q": normal(seed + 1, num_tokens, num_heads, rank),
        "q_rope": normal(seed + 3, num_tokens, num_heads, rope),
        "cache": pool[:, 0].view(num_blocks, block, rank + rope),
        **{name: given[name] for name in ("table", "query_start", "lengths")},
        "scale": (rank + rope) ** -0.5,
    }


class EachLatentQuery(EachNode):
    def take(self, example: Example, keep: list[int]) -> Example:
        has_tail = example.get("tail") is not None
        taken = super().take(example, keep) if has_tail else super(EachNode, self).take(example, keep)
        return taken | {"q_rope": example["q_rope"][keep]}


@examples(ops.latent_attention, EachLatentQuery())
def _latent_attention() -> Iterator[Example]:
    yield paged_latents(0, [], 2, (16, 4))
    yield paged_latents(1, [(1, 1)], 16, (512, 64))
    yield paged_latents(2, [(1, 130), (7, 7), (0, 5), (5, 64), (3, 200)], 4, (32, 8))
    yield paged_latents(3, [(17, 31), (1, 65)], 20, (33, 6), block=8)
    yield paged_latents(4, [(1, 700), (1, 300)], 16, (64, 16), block=32)
    yield paged_latents(5, [(40, 90), (3, 3)], 5, (24, 2), block=1)
    for dtype in FLOATS:
        yield paged_latents(6, [(1, 1000)], 40, (32, 16), dtype=dtype)
        yield paged_latents(7, [(70, 100), (2, 66)], 3, (20, 10), dtype=dtype)
        trees = [BUSH, LINE, [-1, -1, 0, 1]]
        yield with_trees(paged_latents(8, [(9, 132), (4, 30), (4, 66)], 18, (24, 8), dtype=dtype), trees)
        yield with_trees(paged_latents(9, [(12, 70), (9, 9)], 4, (17, 4), block=4, dtype=dtype), [BUSH, BUSH])


class _EachLatent(EachRowInPlace):
    """Rows written into the cache in place: what it holds at their slots."""

    def outputs(self, example: Example, result: object, keep: list[int]) -> Tensor:
        size, slots = example["cache"].shape[1], example["slots"][keep]
        return example["cache"][slots // size, slots % size].float()


@examples(ops.latent_write, _EachLatent("latent", "k_rope", "slots"))
def _latent_write() -> Iterator[Example]:
    shapes = [(0, 8, 4, 4), (1, 512, 64, 16), (13, 33, 6, 8), (110, 24, 8, 16)]
    for dtype in FLOATS:
        for seed, (num_tokens, rank, rope, block) in enumerate(shapes):
            both = normal(seed, num_tokens, rank + rope)
            pool = torch.zeros(9, 2, block, rank + rope, dtype=dtype)
            slots = permutation(seed, 9 * block)[:num_tokens]
            yield {"latent": both[:, :rank], "k_rope": both[:, rank:], "cache": pool[:, 1], "slots": slots}
    extremes = torch.tensor([0.0, 1e-42, 65519.0, 65520.0, -1e9, torch.inf, -torch.inf, torch.nan]).repeat(4, 5)
    cache = torch.zeros(3, 16, 80, dtype=torch.float16)
    yield {"latent": extremes, "k_rope": extremes.flip(1), "cache": cache, "slots": permutation(5, 48)[:4]}


class _EachWidth(EachRowInPlace):
    """Numbers of the latents, which are moved in place."""

    def count(self, example: Example) -> int:
        return int(example["cache"].shape[2])

    def take(self, example: Example, keep: list[int]) -> Example:
        return example | {"cache": example["cache"][:, :, keep].contiguous()}

    def outputs(self, example: Example, result: object, keep: list[int]) -> Tensor:
        return example["cache"][:, :, keep].permute(2, 0, 1).flatten(1).float()


@examples(ops.latent_move, _EachWidth("cache"))
def _latent_move() -> Iterator[Example]:
    chains = [[], [(1, 3)], [(5, 3), (6, 4), (4, 6)], [(i, 30 - i) for i in range(12)]]
    for dtype in FLOATS:
        for seed, (moves, (width, block)) in enumerate(zip(chains, [(8, 4), (70, 16), (33, 4), (20, 1)])):
            cache = normal(seed, 32, block, width).to(dtype)
            yield {"cache": cache, "moves": torch.tensor(moves, dtype=torch.int64).view(-1, 2)}


@examples(ops.head_product, EachRow("x"))
def _head_product() -> Iterator[Example]:
    shapes = [(0, 2, 8, 8), (1, 4, 128, 80), (7, 3, 33, 20), (40, 2, 24, 48)]
    for dtype in (torch.float32, torch.float16):
        for seed, (num_tokens, num_heads, width, num_out) in enumerate(shapes):
            x = normal(seed, num_tokens, num_heads, width + 6, dtype=dtype)
            weight = normal(seed + 9, num_heads, num_out, width, scale=width**-0.5, dtype=dtype)
            yield {"x": x[:, :, :width], "weight": weight}


@examples(ops.head_linear, EachRow("x"))
def _head_linear() -> Iterator[Example]:
    shapes = [(0, 2, 8, 8), (1, 16, 128, 512), (7, 3, 33, 20), (40, 4, 24, 48), (100, 5, 16, 17)]
    for dtype in FLOATS:
        for seed, (num_tokens, num_heads, width, num_out) in enumerate(shapes):
            x = normal(seed, num_tokens, num_heads, width + 6)
            weights = normal(seed + 9, num_heads, num_out, width, scale=width**-0.5).to(dtype)
            yield {"x": x[:, :, :width], "panels": ops.pack_heads(weights), "num_out": num_out}
