"""Embedding from an INT8 or INT4 matrix, stored as `int_product` has it for a tied output head."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.matmul.int_product import PANEL, dequantize_ints
from penstock.ops.registry import op

TOLERANCE = {torch.float16: 0.0}  # by the scales' dtype: values are exact before they are rounded


@op(tolerance=TOLERANCE)
def int_rows(ids: Tensor, words: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return rows ids[T] of the matrix → [T, C] in `dtype`."""
    return dequantize_ints(words, scales, len(words) * PANEL, width)[ids].to(dtype)
