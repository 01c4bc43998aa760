"""How keys and values lie in the paged cache: what the ops that write and read it agree on.

Keys are [N, K, D, P], so that neighbouring positions of one dimension are neighbours in memory, values [N, K, P, D].
An int8 cache holds codes and, per position and head, a float32 scale [N, K, P] for each; one of 8-bit floats has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = {torch.float16: torch.finfo(torch.float16).max, FP8: torch.finfo(FP8).max}
LEAST_SCALED = 2.0**-100  # rows smaller than this are stored as zeros


def cache_pool(
    num_blocks: int, num_heads: int, size: int, head_size: int, dtype: torch.dtype, fill: float = 0
) -> dict[str, Tensor]:
    """New caches as the ops take them, blocks of keys and values side by side: for tests and examples."""
    pool = torch.full((num_blocks, 2, num_heads, size * head_size), fill if dtype.is_floating_point else 0).to(dtype)
    caches = {
        "k_cache": pool[:, 0].view(num_blocks, num_heads, head_size, size),
        "v_cache": pool[:, 1].view(num_blocks, num_heads, size, head_size),
    }
    if dtype is torch.int8:
        scales = torch.full((num_blocks, 2, num_heads, size), float(fill))
        caches |= {"k_scale": scales[:, 0], "v_scale": scales[:, 1]}
    return caches


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """x[..., D] as int8 codes and a scale [...]; NaN and infinity pass into the scale."""
    largest = x.abs().amax(-1)
    used = (largest >= LEAST_SCALED) & largest.isfinite()
    inverse = torch.where(used, 127.0 / largest, 0.0)
    codes = torch.where(used.unsqueeze(-1), x * inverse.unsqueeze(-1), 0.0).round()
    scale = torch.where(largest < LEAST_SCALED, 0.0, largest * (1.0 / 127.0))
    return codes.to(torch.int8), scale


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to the cache's dtype; finite values beyond its range become its largest. An 8-bit float has no
    infinity: NaN takes its place."""
    largest = LARGEST.get(dtype)
    if largest is not None:
        x = torch.where(x.isfinite(), x.clamp(-largest, largest), torch.nan if dtype is FP8 else x)
    return x.to(dtype)


def bits(x: Tensor) -> Tensor:
    """8-bit floats as their bits, which every version of torch can take by index and put; anything else as it is."""
    return x.view(torch.uint8) if x.dtype is FP8 else x
