"""Codes of a few bits in 32-bit words, and 8- and 4-bit floats: unpacked and widened exactly."""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's nibble i of a word holds the column AWQ_ORDER[i] of eight


def unpack_words(words: Tensor, bits: int, count: int, pads: bool = False) -> Tensor:
    """Unpack int32 words [R, W] to codes [R, count] uint8: code i has the bits from i · `bits` on of its row. With
    `pads` no code is cut: a word holds 32 // bits of them, from its lowest bits on."""
    if pads:
        codes = torch.stack([words >> at & (1 << bits) - 1 for at in range(0, 33 - bits, bits)], dim=-1)
        return codes.flatten(1).to(torch.uint8)[:, :count]
    stored = words.contiguous().view(torch.uint8)
    if bits == 8:
        codes = stored
    elif bits in (1, 2, 4):
        codes = torch.stack([stored >> at & (1 << bits) - 1 for at in range(0, 8, bits)], dim=-1).flatten(1)
    else:  # a code may lie in two bytes
        at = torch.arange(count) * bits
        first, second = at // 8, (at // 8 + 1).clamp(max=stored.shape[1] - 1)
        both = stored[:, first].int() | stored[:, second].int() << 8
        codes = (both >> (at % 8).int() & (1 << bits) - 1).to(torch.uint8)
    return codes[:, :count]


def unpack_awq(words: Tensor) -> Tensor:
    """Unpack int32 words [R, W] of AWQ's order to 4-bit codes [R, 8 W]."""
    nibbles = torch.stack([words >> 4 * at & 15 for at in range(8)], dim=-1).to(torch.uint8)
    codes = torch.empty_like(nibbles)
    codes[..., list(AWQ_ORDER)] = nibbles
    return codes.flatten(1)


def unpack_nibbles(stored: Tensor, high_first: bool = False) -> Tensor:
    """Unpack bytes [..., W] to 4-bit codes [..., 2 W], the lower half of a byte first unless `high_first`."""
    halves = [stored & 15, stored >> 4]
    return torch.stack(halves[::-1] if high_first else halves, dim=-1).flatten(-2)


def mxfp4_scale(exponents: Tensor, codes: Tensor) -> Tensor:
    """Return the scales of FP4's doubled levels, half of 2^(e − 127), for bytes e [O, G] and codes [O, C]; 255 is NaN.

    Groups of zeros have no scale, so that their exponent does not matter.
    """
    scale = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 128).masked_fill_(exponents == 255, torch.nan)
    has_values = ((codes.view(*exponents.shape, -1) & 7) != 0).any(dim=-1)
    return scale.masked_fill_(~has_values & (exponents != 255), 0.0)
