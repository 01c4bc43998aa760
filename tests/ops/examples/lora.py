"""Examples of low-rank additions: rows with one adapter, with several summed, with parts of a linear, and with none."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from penstock import ops
from penstock.ops import AdapterRows, LoraStacks, LoraWeights, LowRank, Shift, Term, Whole
from penstock.ops.matmul.lora_stacks import LoraArea
from penstock.ops.registry import Example
from tests.ops.examples.case import examples, integers, normal
from tests.ops.examples.rows import EachRowInPlace

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [(1, 5, 7, 1), (3, 64, 40, 8), (16, 33, 100, 16), (70, 96, 48, 5), (130, 31, 17, 33)]  # rows, in, out, rank


def weights(width: int, num_out: int, rank: int, is_embedding: bool = False) -> LoraWeights:
    """Slot 0: two adapters, the second of another dtype and rank. 1: three parts, one absent, and shifts of some
    outputs. 2: empty. 3: a whole matrix in place of the base's."""

    def low_rank(seed: int, rank: int, first: int, end: int, dtype: torch.dtype) -> LowRank:
        a = normal(seed, rank, width, scale=width**-0.5, dtype=dtype)
        b = normal(seed + 1, end - first, rank, dtype=dtype)
        return LowRank.pack(a, b, first, scale=1.5, is_embedding=is_embedding)

    made = LoraWeights(num_out, num_slots=4, max_parts=3)
    both = [low_rank(10 + i, rank + 3 * i, 0, num_out, DTYPES[rank % 3 - i]) for i in range(2)]
    made.fill(0, [Term([both[0]], 0.5), Term([both[1]], -1.25)])
    cut = num_out // 3
    moved = Shift(cut, normal(30, num_out - cut), normal(31, num_out - cut))
    parts = low_rank(20, rank, 0, cut, DTYPES[1]), low_rank(21, 1, cut + 1, num_out, DTYPES[0])
    made.fill(1, [Term([*parts, moved], 2.0), Term([moved], 0.5)])
    shape = (width, num_out) if is_embedding else (num_out, width)
    whole = Whole.pack(normal(40, *shape, scale=width**-0.5, dtype=DTYPES[rank % 3]), is_embedding)
    made.fill(3, [Term([whole, Shift(0, torch.full((num_out,), -1.0), torch.zeros(num_out))], 1.0)])
    made.fill(2, [Term([both[0]], 1.0)])
    made.fill(2, [])
    return made


def _slots(seed: int, num_rows: int) -> torch.Tensor:
    """Mixed rows, then runs of one slot as prompts make them."""
    slots = integers(seed, 5, num_rows, dtype=torch.int32) - 1
    slots[num_rows // 2 :] = torch.arange(num_rows - num_rows // 2, dtype=torch.int32) // 60
    return slots


def stack(width: int, num_out: int, rank: int, num_matrices: int) -> LoraWeights:
    """Slot 0: two adapters, on some matrices. 1: empty. 2: on all, in two parts, one with a shift."""
    made, half = LoraWeights(num_out, 3, 2, num_matrices), num_out // 2

    def low_rank(matrix: int, first: int, end: int) -> LowRank:
        a = normal(matrix + 60, rank, width, scale=width**-0.5, dtype=DTYPES[matrix % 3])
        return LowRank.pack(a, normal(matrix + 70, end - first, rank), first, 1.5, matrix=matrix)

    odd = [low_rank(matrix, 0, num_out) for matrix in range(1, num_matrices, 2)]
    made.fill(0, [Term(odd, 0.5), Term([low_rank(0, half, num_out)], -2.0)])
    every = [low_rank(m, *ends) for m in range(num_matrices) for ends in ((half, num_out), (0, half))]
    made.fill(2, [Term([*every, Shift(half, normal(1, 3), normal(2, 3), num_matrices - 1)], 1.0)])
    return made


@examples(ops.add_grouped_lora, EachRowInPlace("x", "y", "slots", "ids"))
def _add_grouped_lora() -> Iterator[Example]:
    for seed, (num_rows, width, num_out, rank, count) in enumerate(
        [(1, 20, 32, 4, 5), (7, 40, 48, 17, 6), (90, 33, 16, 3, 4), (0, 8, 16, 2, 3)]
    ):
        chosen = 1 + seed % 3
        common: Example = {"slots": integers(seed, 4, num_rows, dtype=torch.int32) - 1}
        common["weights"] = stack(width, num_out, rank, count)
        ids = integers(seed + 9, count + 1, num_rows * chosen, dtype=torch.int32).view(num_rows, chosen) - 1
        y = normal(seed + 50, num_rows, chosen, num_out)
        yield common | {"x": normal(seed, num_rows, width), "y": y, "ids": ids}
        yield common | {"x": normal(seed, num_rows, chosen, width), "y": y, "ids": ids}
        heads = normal(seed, num_rows, count, width + 5)[:, :, :width]
        yield common | {"x": heads, "y": normal(seed + 50, num_rows, count, num_out)}


@examples(ops.add_lora, EachRowInPlace("x", "y", "slots", "residual"))
def _add_lora() -> Iterator[Example]:
    for seed, (num_rows, width, num_out, rank) in enumerate(SIZES):
        yield {
            "x": normal(seed, num_rows, width),
            "y": normal(seed + 50, num_rows, num_out),
            "slots": _slots(seed, num_rows),
            "weights": weights(width, num_out, rank),
            "residual": normal(seed + 90, num_rows, num_out) if seed % 2 else None,
        }
    yield {
        "x": normal(7, 0, 8),
        "y": normal(8, 0, 9),
        "slots": torch.empty(0, dtype=torch.int32),
        "weights": weights(8, 9, 2),
    }


class _EachAdapterRow(EachRowInPlace):
    def take(self, example: Example, keep: list[int]) -> Example:
        rows = AdapterRows(example["rows"].slots[keep].contiguous())
        return super().take(example, keep) | {"rows": rows}


def stacks(width: int, num_out: int, rank: int, dtype: torch.dtype, is_embedding: bool = False) -> LoraStacks:
    """Slot 0: three parts, a rank under the largest. 1: all outputs at once. 2: one part alone, beside another adapter
    of all outputs where there are ranks for both. 3: was another's before."""
    sizes = [num_out] if is_embedding else [num_out - 2 * (num_out // 4), num_out // 4, num_out // 4]
    made = LoraStacks(rank, (num_out, width), sizes, is_embedding)
    area = LoraArea({"": made, "behind": LoraStacks(rank, (7, 3), [7])}, 4, dtype, torch.device("cpu"))

    def part(seed: int, ranks: int, first: int, last: int) -> LowRank:
        a = normal(seed, ranks, width, scale=1.0 if is_embedding else width**-0.5)
        return LowRank.pack(a.to(dtype), normal(seed + 1, last - first, ranks, dtype=dtype), first, 1.5, is_embedding)

    bounds = list(zip(made.bounds, made.bounds[1:]))
    few = max(1, rank - 1)
    parts = area.lay_out({"": [part(i, few, *bounds[i]) for i in range(len(bounds))]}, few)
    every = area.lay_out({"": [part(9, rank, 0, num_out)]}, rank)
    last, small = (area.lay_out({"": [part(11, 1, *ends)]}, 1) for ends in (bounds[-1], (0, num_out)))
    area.fill(0, [(parts, 0.5)])
    area.fill(1, [(every, -1.25)])
    area.fill(2, [(last, 1.0), (small, 0.25)] if rank > 1 else [(last, 1.0)])
    area.fill(3, [(every, 1.0)])
    area.fill(3, [(parts, 1.0)])
    return made


@examples(ops.add_lora_stacks, _EachAdapterRow("x", "y"))
def _add_lora_stacks() -> Iterator[Example]:
    for seed, (num_rows, width, num_out, rank) in enumerate([(0, 8, 8, 2), (1, 300, 80, 16), (21, 64, 40, 5)]):
        for dtype in (torch.float32, torch.float16):
            yield {
                "x": normal(seed, num_rows, width, dtype=dtype),
                "y": normal(seed + 50, num_rows, num_out, dtype=dtype),
                "rows": AdapterRows(integers(seed + 3, 5, num_rows, dtype=torch.int32) - 1),
                "weights": stacks(width, num_out, rank, dtype),
            }


@examples(ops.add_lora_columns, _EachAdapterRow("ids", "y"))
def _add_lora_columns() -> Iterator[Example]:
    for seed, (num_rows, vocab_size, num_out, rank) in enumerate([(0, 8, 8, 2), (1, 30, 80, 16), (21, 64, 40, 5)]):
        yield {
            "ids": integers(seed, vocab_size, num_rows),
            "y": normal(seed + 50, num_rows, num_out),
            "rows": AdapterRows(integers(seed + 3, 5, num_rows, dtype=torch.int32) - 1),
            "weights": stacks(vocab_size, num_out, rank, torch.float32, is_embedding=True),
        }
    yield {
        "ids": integers(4, 8, 9),
        "y": normal(5, 9, 24),
        "rows": AdapterRows(torch.full((9,), -1, dtype=torch.int32)),
        "weights": stacks(8, 24, 3, torch.float32, is_embedding=True),
    }


@examples(ops.add_lora_rows, EachRowInPlace("ids", "y", "slots"))
def _add_lora_rows() -> Iterator[Example]:
    for seed, (num_rows, vocab_size, num_out, rank) in enumerate(SIZES):
        yield {
            "ids": integers(seed, vocab_size, num_rows),
            "y": normal(seed + 50, num_rows, num_out),
            "slots": _slots(seed, num_rows),
            "weights": weights(vocab_size, num_out, rank, is_embedding=True),
        }
