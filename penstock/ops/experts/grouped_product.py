"""Matrix products in which each row names its matrix, of a stack held as rows [E · O, C], as a GPU has them."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.experts.grouped import multiply_groups
from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.fp8_product import quantize_fp8, widen_groups
from penstock.ops.matmul.int_product import dequantize_ints
from penstock.ops.registry import op
from penstock.ops.triton.tuning import uses_grouped_gemv


def _multiply(x: Tensor, weight: Tensor, ids: Tensor, num_matrices: int, epilogue: Epilogue) -> Tensor:
    stack = weight.view(num_matrices, -1, weight.shape[1])
    return multiply_groups(x.float(), stack, ids, epilogue).to(x.dtype)


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3})
def grouped_product(
    x: Tensor, weight: Tensor, ids: Tensor, num_matrices: int, epilogue: Epilogue = NO_EPILOGUE
) -> Tensor:
    """Multiply as `grouped_matmul` does, for weight[E · O, C]."""
    return _multiply(x, weight.float(), ids, num_matrices, epilogue)


@op(tolerance={torch.float32: 1e-1, torch.bfloat16: 1e-1})
def grouped_fp8_product(
    x: Tensor, codes: Tensor, scale: Tensor, ids: Tensor, num_matrices: int, epilogue: Epilogue = NO_EPILOGUE
) -> Tensor:
    """Multiply as `grouped_matmul` does, for FP8 codes[E · O, C] times scale[E · O]. Unless they are few, rows are
    quantized too, each with a scale of its own."""
    y = x.float()
    if not uses_grouped_gemv(ids.shape[0], ids.shape[1], num_matrices):
        rounded, factors = quantize_fp8(y.flatten(0, -2))
        y = (rounded.float() * factors[:, None]).view(x.shape)
    return _multiply(y, codes.float() * scale[:, None], ids, num_matrices, epilogue).to(x.dtype)


@op(tolerance={torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3})
def grouped_int_product(
    x: Tensor, words: Tensor, scales: Tensor, ids: Tensor, num_matrices: int, epilogue: Epilogue = NO_EPILOGUE
) -> Tensor:
    """Multiply as `grouped_matmul` does, for a stack of integer codes, laid out as for `int_product`. The outputs of
    a matrix must fill whole panels."""
    weight = dequantize_ints(words, scales, len(words) * words.shape[2], x.shape[-1])
    return _multiply(x, weight, ids, num_matrices, epilogue)


@op(tolerance={torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3})
def grouped_fp8_group_product(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    group: int,
    ids: Tensor,
    num_matrices: int,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Tensor:
    """Multiply as `grouped_matmul` does, for FP8 codes[E · O, C] with scales as `fp8_group_product` has them."""
    return _multiply(x, widen_groups(codes, scale, group), ids, num_matrices, epilogue)
