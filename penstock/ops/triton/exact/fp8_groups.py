from __future__ import annotations

from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.fp8_product import fp8_group_product
from penstock.ops.triton.exact.int_product import multiply_in_parts
from penstock.ops.triton.exact.product import apply_exact_epilogue
from penstock.ops.triton.matmul.fp8_groups import group_gemm, widen_outputs
from penstock.ops.triton.norm import apply_norm
from penstock.ops.triton.tuning import MAX_FP8_TILE_ROWS


@fp8_group_product.impl("cuda", exact=True)
def _body(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    group: int,
    epilogue: Epilogue = NO_EPILOGUE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Multiply some rows in tiles that widen in registers, many by widened weights: both sums are the same chain."""
    y = apply_norm(x, norm, eps) if eps > 0 else x
    y = y if y.stride(1) == 1 else y.contiguous()
    if not len(y):
        return y.new_empty((0, epilogue.num_results(len(weight))))
    if len(y) <= MAX_FP8_TILE_ROWS and y.itemsize == 2:
        return apply_exact_epilogue(group_gemm(y, weight, scale, group, NO_EPILOGUE, exact=True), epilogue)

    def widen(out: Tensor, first: int) -> None:
        widen_outputs(out, weight, scale, group, first)

    return apply_exact_epilogue(multiply_in_parts(y, len(weight), widen), epilogue)
