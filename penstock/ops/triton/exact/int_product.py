from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.int_product import PANEL, int_product
from penstock.ops.triton.exact.product import apply_exact_epilogue, exact_gemm
from penstock.ops.triton.matmul.int_product import scratch, tile_gemm
from penstock.ops.triton.matmul.int_rows import dequantize
from penstock.ops.triton.norm import apply_norm
from penstock.ops.triton.sizes import cdiv
from penstock.ops.triton.tuning import MAX_INT_TILE_ROWS

Widen = Callable[[Tensor, int], None]  # write outputs from this one on


def multiply_in_parts(x: Tensor, num_out: int, widen: Widen) -> Tensor:
    """Multiply by a weight [num_out, C] of which some outputs at a time are widened → [T, O]."""
    num_rows, width = x.shape
    room = scratch(x.device).view(x.dtype)
    at_once = max(1, len(room) // width // PANEL) * PANEL
    sums = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
    for first in range(0, num_out, at_once):
        last = min(first + at_once, num_out)
        weight = room[: (last - first) * width].view(-1, width)
        widen(weight, first)
        sums[:, first:last] = exact_gemm(x, weight, NO_EPILOGUE, x.dtype)
    return sums


@int_product.impl("cuda", exact=True)
def _body(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    num_out: int,
    epilogue: Epilogue = NO_EPILOGUE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Multiply few rows in tiles that dequantize in registers, many by weights dequantized alike: both sums are the
    same chain (decision 0034)."""
    y = apply_norm(x, norm, eps) if eps > 0 else x
    y = y if y.stride(1) == 1 else y.contiguous()
    if not len(y):
        return y.new_empty((0, epilogue.num_results(num_out)))
    if len(y) <= MAX_INT_TILE_ROWS and y.itemsize == 2:
        return apply_exact_epilogue(tile_gemm(y, words, scales, num_out, NO_EPILOGUE, exact=True), epilogue)

    def widen(weight: Tensor, first: int) -> None:
        panels = slice(first // PANEL, cdiv(first + len(weight), PANEL))
        dequantize(weight, words[panels], scales[panels], as_multiplied=y.itemsize == 2)

    return apply_exact_epilogue(multiply_in_parts(y, num_out, widen), epilogue)
