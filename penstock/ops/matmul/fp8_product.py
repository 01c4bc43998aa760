"""Matrix products with an FP8 weight: one scale per output, or one for each group of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue, apply_epilogue
from penstock.ops.matmul.product import apply_prologue
from penstock.ops.registry import op

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
MIN_LARGEST = 1e-12  # of a row, so that its scale is not 0
MIN_GROUP = 32  # inputs, of which groups have a multiple
MULTIPLE = 16  # both sizes must be one, for cuBLAS


def can_store(num_out: int, num_in: int) -> bool:
    """Return True if a weight of that shape can be FP8."""
    return num_out % MULTIPLE == 0 and num_in % MULTIPLE == 0


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of x as FP8 codes and a scale each; NaN and infinity make their row NaN."""
    scale = x.float().abs().amax(-1).clamp(min=MIN_LARGEST) / LARGEST
    return (x.float() / scale[:, None]).clamp(-LARGEST, LARGEST).to(FP8), scale


def can_group(num_out: int, num_in: int, group: int) -> bool:
    """Return True if a weight of that shape can be FP8 with a scale for each `group` inputs."""
    return can_store(num_out, num_in) and group % MIN_GROUP == 0


def widen_groups(codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """Return the exact weight [O, C] of codes with scale[ceil(C / group), O], float32."""
    return codes.float() * scale.t().repeat_interleave(group, dim=1)[:, : codes.shape[1]]


@op(tolerance={torch.float32: 5e-2, torch.bfloat16: 1e-1})
def fp8_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    epilogue: Epilogue = NO_EPILOGUE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Multiply as `product` does, for an FP8 weight[O, C] times scale[O]. Several rows are quantized too, each with a
    scale of its own, so that a row's result does not depend on the others."""
    y = apply_prologue(x, norm, eps)
    if x.shape[0] > 1:
        codes, scales = quantize_fp8(y)
        y = codes.float() * scales[:, None]
    sums = y @ (weight.float() * scale[:, None]).T
    return apply_epilogue(sums, epilogue).to(x.dtype)


@op(tolerance={torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3})
def fp8_group_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    group: int,
    epilogue: Epilogue = NO_EPILOGUE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Multiply as `product` does, for an FP8 weight[O, C] whose inputs have scale[ceil(C / group), O]. Rows are not
    rounded."""
    y = apply_prologue(x, norm, eps)
    return apply_epilogue(y @ widen_groups(weight, scale, group).T, epilogue).to(x.dtype)
