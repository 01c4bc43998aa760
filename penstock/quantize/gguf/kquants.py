"""Encode K-quants: blocks of 256 values whose groups have integer scales of their own.

Scales are searched on two levels: first the float scale (and minimum) of every group, then the two float16 numbers
that those become multiples of; the codes are rounded anew for the scales as stored. Layouts: `penstock/quant/gguf.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.quantize.gguf.fits import AFFINE, Range, divide, fit_affine, fit_positive, fit_symmetric

Bytes = NDArray[np.uint8]
BLOCK = 256
TWO_BITS = Range(-0.5, 0.1, 16)
FINE = Range(-0.9, 0.05, 37)  # where some inputs matter more


def _half(x: Tensor) -> Tensor:
    return x.half().float()


def _bytes(x: Tensor) -> Bytes:
    return x.to(torch.uint8).numpy()


def _f16(x: Tensor) -> Bytes:
    return x.half().numpy().view(np.uint8).reshape(len(x), 2)


def _importance(x: Tensor, given: Tensor | None, share: float) -> Tensor | None:
    """Weigh errors by the inputs' importance, more at large values: given · √(share · mean square + x²)."""
    if given is None:
        return None
    return given * (share * x.square().mean(1, keepdim=True) + x * x).sqrt()


def _planes(codes: Bytes, bits: int) -> Bytes:
    """Pack codes [N, R, 8 / bits, W] of `bits` each to bytes [N, R · W], the first plane lowest."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(codes << shifts, axis=2).reshape(len(codes), -1)
    return packed


def _nibbles(codes: Bytes, width: int) -> Bytes:
    """Pack 4-bit codes [N, 256]: of every 2 · width values the first half lies in the low halves of bytes."""
    return _planes(codes.reshape(len(codes), -1, 2, width), 4)


class _Affine:
    """Groups with a scale and a minimum: x ≈ d · scale · q − dmin · minimum."""

    def __init__(self, x: Tensor, w: Tensor, group: int, tops: tuple[int, int], tried: Range) -> None:
        """`tops`: the largest code, and the largest integer scale and minimum."""
        count, (top, top_scale) = len(x), tops
        x3, w3 = x.view(count, -1, group), w.view(count, -1, group)
        flat, flat_w = x3.reshape(-1, group), w3.reshape(-1, group)
        scale, minimum = fit_affine(flat, flat_w, top, tried)
        scale, below = scale.view(count, -1), -minimum.view(count, -1)
        totals = w3.sum(2)
        self.d = _half(fit_positive(scale, totals, top_scale))
        self.dmin = _half(fit_positive(below, totals, top_scale))
        self.scales = divide(scale, self.d[:, None]).round().clamp(0, top_scale)
        self.minimums = divide(below, self.dmin[:, None]).round().clamp(0, top_scale)
        self._refine(x3, w3, top)
        self.codes = self._codes(x3, top).reshape(count, BLOCK)

    def _codes(self, x: Tensor, top: int) -> Tensor:
        scale, minimum = self.d[:, None] * self.scales, self.dmin[:, None] * self.minimums
        return divide(x + minimum[..., None], scale[..., None]).round().clamp(0, top)

    def _error(self, x: Tensor, w: Tensor, top: int) -> Tensor:
        scale, minimum = self.d[:, None] * self.scales, self.dmin[:, None] * self.minimums
        return (w * (scale[..., None] * self._codes(x, top) - minimum[..., None] - x).square()).sum((1, 2))

    def _refine(self, x: Tensor, w: Tensor, top: int) -> None:
        """Solve for d and dmin together, for the codes and integers found; keep them where the error falls."""
        before, d, dmin = self._error(x, w, top), self.d, self.dmin
        a = self._codes(x, top) * self.scales[..., None]
        b = -self.minimums[..., None].expand_as(a)
        aa, ab, bb = ((w * p * q).sum((1, 2)) for p, q in ((a, a), (a, b), (b, b)))
        ax, bx = (w * a * x).sum((1, 2)), (w * b * x).sum((1, 2))
        determinant = aa * bb - ab * ab
        is_whole = determinant > 1e-6 * aa * bb
        new = torch.where(is_whole, divide(ax * bb - bx * ab, determinant), divide(ax + dmin * 0, aa))
        new_min = torch.where(is_whole, divide(bx * aa - ax * ab, determinant), dmin)
        self.d, self.dmin = _half(new.clamp(min=0)), _half(new_min.clamp(min=0))
        is_worse = ~(self._error(x, w, top) < before)
        self.d, self.dmin = torch.where(is_worse, d, self.d), torch.where(is_worse, dmin, self.dmin)


def _symmetric(x: Tensor, w: Tensor, top: int, top_scale: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fit groups of 16 without minimum → d [N], scales [N, 16] in −top_scale … top_scale − 1, codes [N, 256]."""
    count = len(x)
    x3, w3 = x.view(count, 16, 16), w.view(count, 16, 16)
    scale = fit_symmetric(x3.reshape(-1, 16), w3.reshape(-1, 16), top).view(count, 16)
    best_d, best_scales, best_codes, least = None, scale, x, None
    for steps in (float(-top_scale), -top_scale + 0.5, -top_scale + 1.0, top_scale - 1.0, None):
        extreme = scale.gather(1, scale.abs().argmax(1, keepdim=True))[:, 0]
        d = _half(fit_symmetric(scale, w3.sum(2), top_scale) if steps is None else extreme / steps)
        scales = divide(scale, d[:, None]).round().clamp(-top_scale, top_scale - 1)
        stored = (d[:, None] * scales)[..., None]
        codes = divide(x3, stored).round().clamp(-top, top - 1)
        error = (w3 * (stored * codes - x3).square()).sum((1, 2))
        if best_d is None or least is None:
            best_d, best_scales, best_codes, least = d, scales, codes, error
            continue
        is_better = error < least
        best_d, least = torch.where(is_better, d, best_d), torch.minimum(error, least)
        best_scales = torch.where(is_better[:, None], scales, best_scales)
        best_codes = torch.where(is_better[:, None, None], codes, best_codes)
    assert best_d is not None
    return best_d, best_scales, best_codes.reshape(count, BLOCK)


def q2_k(x: Tensor, given: Tensor | None) -> Bytes:
    weights = _importance(x, given, 1.0)
    fit = _Affine(x, x.abs() if weights is None else weights, 16, (3, 15), TWO_BITS if given is None else FINE)
    scales = _bytes(fit.scales) | _bytes(fit.minimums) << np.uint8(4)
    codes = _planes(_bytes(fit.codes).reshape(len(x), 2, 4, 32), 2)
    return np.concatenate([scales, codes, _f16(fit.d), _f16(fit.dmin)], axis=1)


def q3_k(x: Tensor, given: Tensor | None) -> Bytes:
    weights = _importance(x, given, 2.0)
    d, scales, codes = _symmetric(x, x.abs() if weights is None else weights, 4, 32)
    six, three = _bytes(scales + 32), _bytes(codes + 4)
    upper = _planes((six >> np.uint8(4)).reshape(len(x), 1, 4, 4), 2)
    packed = np.concatenate([_planes((six & np.uint8(15)).reshape(len(x), 1, 2, 8), 4), upper], axis=1)
    high = _planes((three >> np.uint8(2)).reshape(len(x), 1, 8, 32), 1)
    low = _planes((three & np.uint8(3)).reshape(len(x), 2, 4, 32), 2)
    return np.concatenate([high, low, packed, _f16(d)], axis=1)


def _pack_header(fit: _Affine) -> Bytes:
    """Pack d, dmin and eight 6-bit scales and minimums."""
    scales, minimums = _bytes(fit.scales), _bytes(fit.minimums)
    four = np.uint8(4)  # the two upper bits of the last four lie above the first four
    first = scales[:, :4] | (scales[:, 4:] >> four) << np.uint8(6)
    second = minimums[:, :4] | (minimums[:, 4:] >> four) << np.uint8(6)
    rest = scales[:, 4:] & np.uint8(15) | minimums[:, 4:] << four
    return np.concatenate([_f16(fit.d), _f16(fit.dmin), first, second, rest], axis=1)


def _fit_32(x: Tensor, given: Tensor | None, top: int) -> _Affine:
    weights = _importance(x, given, 2.0)
    if weights is None:
        groups = x.view(-1, 32)
        weights = (groups.square().mean(1, keepdim=True).sqrt() + groups.abs()).view_as(x)
    return _Affine(x, weights, 32, (top, 63), AFFINE if given is None else FINE)


def q4_k(x: Tensor, given: Tensor | None) -> Bytes:
    fit = _fit_32(x, given, 15)
    return np.concatenate([_pack_header(fit), _nibbles(_bytes(fit.codes), 32)], axis=1)


def q5_k(x: Tensor, given: Tensor | None) -> Bytes:
    fit = _fit_32(x, given, 31)
    codes = _bytes(fit.codes)
    high = _planes((codes >> np.uint8(4)).reshape(len(x), 1, 8, 32), 1)
    return np.concatenate([_pack_header(fit), high, _nibbles(codes & np.uint8(15), 32)], axis=1)


def q6_k(x: Tensor, given: Tensor | None) -> Bytes:
    d, scales, codes = _symmetric(x, x * x if given is None else given, 32, 128)
    six = _bytes(codes + 32)
    high = _planes((six >> np.uint8(4)).reshape(len(x), 2, 4, 32), 2)
    stored = scales.to(torch.int8).numpy().view(np.uint8)
    return np.concatenate([_nibbles(six & np.uint8(15), 64), high, stored, _f16(d)], axis=1)


ENCODERS: dict[str, Callable[[Tensor, Tensor | None], Bytes]] = {
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
