"""Layout of keys and values in the paged cache, for the ops that write and read it.

Keys are [N, K, D, P], so that neighbouring positions of one dimension are neighbours in memory, values [N, K, P, D].
An int8 cache holds codes and, per position and head, a float32 scale [N, K, P] for each; one of 8-bit floats has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = {torch.float16: torch.finfo(torch.float16).max, FP8: torch.finfo(FP8).max}
MIN_SCALED = 2.0**-100  # rows smaller than this are stored as zeros


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x[..., D] to int8 codes and a scale [...]; NaN and infinity pass into the scale."""
    largest = x.abs().amax(-1)
    used = (largest >= MIN_SCALED) & largest.isfinite()
    inverse = torch.where(used, 127.0 / largest, 0.0)
    codes = torch.where(used.unsqueeze(-1), x * inverse.unsqueeze(-1), 0.0).round()
    scale = torch.where(largest < MIN_SCALED, 0.0, largest * (1.0 / 127.0))
    return codes.to(torch.int8), scale


def cast_to_cache(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to the cache's dtype; finite values beyond its range become its largest. FP8 has no infinity: NaN takes
    its place."""
    largest = LARGEST.get(dtype)
    if largest is not None:
        x = torch.where(x.isfinite(), x.clamp(-largest, largest), torch.nan if dtype is FP8 else x)
    return x.to(dtype)


def bits(x: Tensor) -> Tensor:
    """View FP8 as bytes, which every version of torch can index; return anything else as it is."""
    return x.view(torch.uint8) if x.dtype is FP8 else x
