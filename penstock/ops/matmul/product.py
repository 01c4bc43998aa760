"""Matrix product with a row-major weight, with an RMSNorm prologue and an epilogue."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue, apply_epilogue
from penstock.ops.norm import rms_norm
from penstock.ops.registry import op
from penstock.ops.triton.tuning import MAX_DEFERRED_NORM_VALUES, MAX_SKINNY_ROWS, SKINNY_OUTPUTS


def is_skinny(x: Tensor, weight: Tensor, norm: Tensor | None) -> bool:
    """Return True if the skinny GEMM, which fuses the norm and the epilogue, is faster than cuBLAS."""
    return (
        1 < x.shape[0] <= MAX_SKINNY_ROWS
        and weight.shape[0] in SKINNY_OUTPUTS
        and norm is None
        and x.itemsize == 2
        and weight.dtype == x.dtype
        and x.stride(1) == 1
        and weight.is_contiguous()
    )


def can_defer_norm(x: Tensor, norm: Tensor | None, bias: Tensor | None, eps: float) -> bool:
    """Return True if the consumer should apply the RMS factor of a few rows. The sums are larger until then, which
    bfloat16 can hold."""
    return (
        eps > 0
        and norm is None
        and bias is None
        and x.dtype == torch.bfloat16
        and x.shape[0] > 1
        and x.numel() <= MAX_DEFERRED_NORM_VALUES
        and x.stride(1) == 1
    )


@op(tolerance={torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3})
def product(
    x: Tensor, weight: Tensor, epilogue: Epilogue = NO_EPILOGUE, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Apply the epilogue to y · weightᵀ → [T, O], gated [T, O/2], for x[T, C] and weight[O, C].

    y is x, or its `rms_norm` if eps > 0, with weights norm[C] or none. The result may be written into the residual.
    """
    return apply_epilogue(apply_prologue(x, norm, eps) @ weight.float().T, epilogue).to(x.dtype)


def apply_prologue(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """Return x, or its RMS norm if eps > 0, in float32: the reference of every body's own."""
    y = x.float()
    return rms_norm.reference(y, y.new_ones(y.shape[1]) if norm is None else norm, eps) if eps > 0 else y
