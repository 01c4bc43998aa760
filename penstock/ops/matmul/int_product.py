"""Matrix product with an INT8 or INT4 weight.

The storage of such a weight [O, C] on a GPU: a group is 32 inputs of an output, with one scale; two neighbouring groups
are a pair, 8 outputs a panel. There are N = ceil(O/8) panels and P = ceil(C/64) pairs, padded with 0:

* words[N, P, 8, 2 · bits] of 32 bits, so that a panel is read from one place;
* with 8 bits scales[N, P, 8, 2] in float16, one for each group; a value is scale · (code − 128);
* with 4 bits scales[N, P, 2, 8, 2], for each group a scale and a minimum; a value is scale · code + minimum;
* with either scales[N, P, S, 8, 2] of S = 2 or 4 sets, for each group or each half of one a scale and, with 4 bits, a
  minimum, with 8 a middle; a value is scale · (code − 128) + middle. A middle is nearer to the values than a minimum,
  and so loses less in 16 bits.

Eight words are a span: a group of 8 bits, a pair of 4. Its 16 halves of 16 bits hold 16/bits fields each, the lowest
bits being field 0: field f of half h is the code of the span's input 16 f + h. So one mask finds two codes of a word,
of neighbouring inputs, each where a 16-bit float can be made of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue, apply_epilogue
from penstock.ops.matmul.packed import GROUP
from penstock.ops.matmul.product import apply_prologue
from penstock.ops.registry import op

PANEL = 8  # outputs
PAIR = 2 * GROUP  # inputs
SPAN = 8  # words


def num_panels(num_out: int) -> int:
    return -(-num_out // PANEL)


def empty_ints(
    bits: int, num_out: int, width: int, device: torch.device | str = "cpu", sets: int | None = None
) -> tuple[Tensor, Tensor]:
    """Allocate words and scales of a weight; by default bare scales with 8 bits, 2 sets with 4."""
    size = num_panels(num_out), -(-width // PAIR)
    sets = (0 if bits == 8 else 2) if sets is None else sets
    scales = (sets, PANEL, 2) if sets else (PANEL, 2)
    return (
        torch.empty((*size, PANEL, 2 * bits), dtype=torch.int32, device=device),
        torch.empty((*size, *scales), dtype=torch.float16, device=device),
    )


def _split_panels(values: Tensor) -> Tensor:
    """Reorder outputs and groups [O, G, …] → [N, P, 8, 2, …], padded with 0."""
    num_out, groups = values.shape[:2]
    panels, pairs = num_panels(num_out), -(-groups // 2)
    if (panels * PANEL, pairs * 2) != (num_out, groups):
        whole = values.new_zeros((panels * PANEL, pairs * 2, *values.shape[2:]))
        whole[:num_out, :groups] = values
        values = whole
    return values.view(panels, PANEL, pairs, 2, *values.shape[2:]).transpose(1, 2)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [O, G, 32] from 0 to 2^bits − 1 → words [N, P, 8, 2 · bits]."""
    panels = _split_panels(codes.to(torch.int32))
    spans = panels.reshape(*panels.shape[:3], bits // 4, 16 // bits, SPAN, 2)  # … field, word, half
    words = torch.zeros((*spans.shape[:4], SPAN), dtype=torch.int32, device=codes.device)
    for field in range(16 // bits):
        for half in range(2):
            words |= spans[..., field, :, half] << 16 * half + bits * field
    return words.flatten(3)


def pack_scales(scales: Tensor) -> Tensor:
    """Pack the groups' scales [O, G] → [N, P, 8, 2]; with minimums or middles [O, G, 2] → [N, P, 2, 8, 2], of both
    halves of groups [O, G, 2, 2] → [N, P, 4, 8, 2]."""
    panels = _split_panels(scales)
    if scales.dim() == 2:
        return panels.contiguous()
    return panels.view(*panels.shape[:3], -1, 2).transpose(2, 3).contiguous()


def bits_of(words: Tensor) -> int:
    return words.shape[3] // 2


def sets_of(scales: Tensor) -> int:
    """Return the sets of a scale and a minimum or middle that a pair has; 0 for bare scales."""
    return 0 if scales.dim() == 4 else scales.shape[2]


def unpack_codes(words: Tensor) -> Tensor:
    """Unpack words [N, P, 8, 2 · bits] → codes [8 N, 2 P, 32] from 0 to 2^bits − 1, int32."""
    bits = bits_of(words)
    spans = words.view(*words.shape[:3], -1, SPAN)
    halves = [
        torch.stack([spans >> 16 * half + bits * field & (1 << bits) - 1 for half in range(2)], -1)
        for field in range(16 // bits)
    ]
    codes = torch.stack(halves, 4)  # panel, pair, output, span, field, word, half
    return codes.transpose(1, 2).reshape(len(words) * PANEL, -1, GROUP)


def dequantize_ints(words: Tensor, scales: Tensor, num_out: int, width: int) -> Tensor:
    """Return the exact weight [O, C], float32."""
    codes = unpack_codes(words)
    if scales.dim() == 4:
        factors = scales.transpose(1, 2).reshape(*codes.shape[:2]).float()
        values = (codes - 128).float() * factors[..., None]
    else:
        sets = sets_of(scales)
        both = scales.permute(0, 3, 1, 2, 4).reshape(codes.shape[0], -1, 1, 2).float()
        parts = (codes - (128 if bits_of(words) == 8 else 0)).float().view(codes.shape[0], both.shape[1], PAIR // sets)
        values = parts * both[..., 0] + both[..., 1]
    return values.flatten(1)[:num_out, :width]


@op(tolerance={torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3})
def int_product(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    num_out: int,
    epilogue: Epilogue = NO_EPILOGUE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Multiply as `product` does, for a weight [num_out, C] of integer codes and scales."""
    y = apply_prologue(x, norm, eps)
    return apply_epilogue(y @ dequantize_ints(words, scales, num_out, x.shape[1]).T, epilogue).to(x.dtype)
