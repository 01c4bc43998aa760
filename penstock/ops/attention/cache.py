"""Layout of keys and values in the paged cache, for the ops that write and read it.

Keys are [N, K, D, P], so that neighbouring positions of one dimension are neighbours in memory, values [N, K, P, D].
An int8 cache holds codes and, per position and head, a float32 scale [N, K, P] for each; one of 8-bit floats has none.
An int4 cache (uint8) holds two codes a byte, keys [N, K, D / 2, P], values [N, K, P, D / 2]; for each 32 dimensions of
a position and head, or those left, a scale and a minimum in float16: [N, K, G, 2, P] of the keys, [N, K, P, G, 2] of
the values. A byte holds dimensions i and i + half of its 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = {torch.float16: torch.finfo(torch.float16).max, FP8: torch.finfo(FP8).max}
INT4_GROUP = 32  # dimensions with a scale of their own
MIN_SCALED = 2.0**-100  # rows smaller than this are stored as zeros


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x[..., D] to int8 codes and a scale [...]; NaN and infinity pass into the scale."""
    largest = x.abs().amax(-1)
    used = (largest >= MIN_SCALED) & largest.isfinite()
    inverse = torch.where(used, 127.0 / largest, 0.0)
    codes = torch.where(used.unsqueeze(-1), x * inverse.unsqueeze(-1), 0.0).round()
    scale = torch.where(largest < MIN_SCALED, 0.0, largest * (1.0 / 127.0))
    return codes.to(torch.int8), scale


def head_size_of(k_cache: Tensor) -> int:
    """Return how many numbers a head's key has."""
    return k_cache.shape[2] * (2 if k_cache.dtype is torch.uint8 else 1)


def _halves(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the dimensions of the low and the high codes of each byte, and the bytes' groups."""
    byte = torch.arange(size // 2)
    group = byte // (INT4_GROUP // 2)
    half = (size - INT4_GROUP * group).clamp(max=INT4_GROUP) // 2
    low = INT4_GROUP * group + byte % (INT4_GROUP // 2)
    return low, low + half, group


def quantize_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x[..., D] to bytes of two codes [..., D / 2], and scales with minimums [..., G, 2]. A number that is not
    finite makes its group's minimum NaN."""
    low, high, group = _halves(x.shape[-1])
    parts = torch.split(x.float(), INT4_GROUP, -1)
    low_end, high_end = (torch.stack([reach(part, -1) for part in parts], -1) for reach in (torch.amin, torch.amax))
    finite = torch.stack([part.isfinite().all(-1) for part in parts], -1)
    least = cast_to_cache(torch.where(finite, low_end, torch.nan), torch.float16)
    scale = cast_to_cache(torch.where(finite, (high_end - low_end) * (1.0 / 15.0), 0.0), torch.float16)
    inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0)

    def encode(dims: Tensor) -> Tensor:
        levels = (x[..., dims].float() - least.float()[..., group]) * inverse[..., group]
        return torch.where(inverse[..., group] > 0, levels.clamp(0.0, 15.0).round(), 0.0).to(torch.uint8)

    return encode(low) | encode(high) << 4, torch.stack([scale, least], -1)


def widen_int4(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers [..., D] that bytes [..., D / 2] with scales [..., G, 2] stand for."""
    low, high, group = _halves(2 * codes.shape[-1])
    scale, minimum = scales.float().unbind(-1)
    x = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], device=codes.device)
    for dims, code in ((low, codes & 15), (high, codes >> 4)):
        x[..., dims] = code.float() * scale[..., group] + minimum[..., group]
    return x


def read_cache(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, blocks: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the keys and values [L, K, D] in float32 at `places` of `blocks`."""
    k = bits(k_cache)[blocks, :, :, places].view(k_cache.dtype)
    v = bits(v_cache)[blocks, :, places].view(v_cache.dtype)
    if k_scale is None or v_scale is None:
        return k.float(), v.float()
    if k_cache.dtype is torch.uint8:
        return widen_int4(k, k_scale[blocks, :, :, :, places]), widen_int4(v, v_scale[blocks, :, places])
    return k * k_scale[blocks, :, places].unsqueeze(-1), v * v_scale[blocks, :, places].unsqueeze(-1)


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
