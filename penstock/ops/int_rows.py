"""Rows of a matrix of 8- or 4-bit integers, as `int_product` has it, so that a tied output head shares its storage."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import integers
from penstock.ops.int_product import PANEL, int_example, widened
from penstock.ops.registry import Example, op

TOLERANCE = {torch.float16: 0.0}  # of the scales: values are exact before they are rounded to the dtype


def _examples() -> Iterator[Example]:
    for seed, (num_rows, width, count) in enumerate([(50, 96, 7), (9, 2048, 1), (33, 80, 40), (4, 576, 0)]):
        for bits in (8, 4):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                words, scales = int_example(seed, bits, num_rows, width)
                ids = integers(seed, num_rows, 2 * count)[::2] if seed % 2 == 0 else integers(seed, num_rows, count)
                yield {"ids": ids, "words": words, "scales": scales, "width": width, "dtype": dtype}


@op(tolerance=TOLERANCE, examples=_examples)
def int_rows(ids: Tensor, words: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Rows ids[T] of the matrix → [T, C] in that dtype."""
    return widened(words, scales, len(words) * PANEL, width)[ids].to(dtype)
