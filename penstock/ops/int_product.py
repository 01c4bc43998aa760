"""A matrix product with a weight of 8- or 4-bit integers, and what stands before and after it.

How a GPU holds such a weight [O, C]: a group is 32 inputs of an output, with one scale; two groups side by side are a
pair, 8 outputs a panel. In N = ceil(O/8) panels and P = ceil(C/64) pairs, what is not there being 0, it is

* words[N, P, 8, 2 · bits] of 32 bits, so that a panel is read from one place;
* with 8 bits scales[N, P, 8, 2] in float16, one for each group; a value is scale · (code − 128);
* with 4 bits scales[N, P, 2, 8, 2], for each group a scale and a minimum; a value is scale · code + minimum.

Eight words are a span: a group of 8 bits, a pair of 4. Its 16 halves of 16 bits hold 16/bits fields each, the lowest
bits being field 0: field f of half h is the code of the span's input 16 f + h. So one mask finds two codes of a word,
whose inputs lie side by side, each where a 16-bit float may be made of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.activation import finished
from penstock.ops.example import integers, normal
from penstock.ops.packed import GROUP
from penstock.ops.product import product
from penstock.ops.registry import Example, op
from penstock.ops.rms_norm import rms_norm
from penstock.ops.rows import EachRow

PANEL = 8  # outputs
PAIR = 2 * GROUP  # inputs
SPAN = 8  # words
TILES = (16, 32, 64, 128)  # rows that a GPU multiplies at a time
FEW = 128  # rows; for more the weight is widened first, a small one for half as many
SCRATCH_BYTES = 128 << 20  # where it is, so much at a time


def num_panels(num_out: int) -> int:
    return -(-num_out // PANEL)


def empty_ints(bits: int, num_out: int, width: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Words and scales of a weight, yet to be filled."""
    size = num_panels(num_out), -(-width // PAIR)
    scales = (PANEL, 2) if bits == 8 else (2, PANEL, 2)
    return (
        torch.empty((*size, PANEL, 2 * bits), dtype=torch.int32, device=device),
        torch.empty((*size, *scales), dtype=torch.float16, device=device),
    )


def int_example(seed: int, bits: int, num_out: int, width: int) -> tuple[Tensor, Tensor]:
    """Words and scales of values around 0, about width^-0.5 in size."""
    groups, size = -(-width // GROUP), width**-0.5
    codes = integers(seed, 1 << bits, num_out, groups, GROUP)
    scale = normal(seed + 1, num_out, groups, scale=size / (80 if bits == 8 else 5)).abs()
    if bits == 4:
        minimum = -7.5 * scale + normal(seed + 2, num_out, groups, scale=size / 5)
        scale = torch.stack([scale, minimum], -1)
    return pack_codes(codes, bits), pack_scales(scale.half())


def _examples() -> Iterator[Example]:
    assert product.examples is not None
    for number, example in enumerate(product.examples()):
        num_out, width = example.pop("weight").shape
        for bits in (8, 4):
            words, scales = int_example(number, bits, num_out, width)
            yield {"x": example["x"], "words": words, "scales": scales, "num_out": num_out, **example}


def _in_panels(values: Tensor) -> Tensor:
    """Of outputs and groups [O, G, …] → [N, P, 8, 2, …], the last of them 0."""
    num_out, groups = values.shape[:2]
    panels, pairs = num_panels(num_out), -(-groups // 2)
    if (panels * PANEL, pairs * 2) != (num_out, groups):
        whole = values.new_zeros((panels * PANEL, pairs * 2, *values.shape[2:]))
        whole[:num_out, :groups] = values
        values = whole
    return values.view(panels, PANEL, pairs, 2, *values.shape[2:]).transpose(1, 2)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes [O, G, 32] from 0 to 2^bits − 1 → words [N, P, 8, 2 · bits]."""
    panels = _in_panels(codes.to(torch.int32))
    spans = panels.reshape(*panels.shape[:3], bits // 4, 16 // bits, SPAN, 2)  # … field, word, half
    words = torch.zeros((*spans.shape[:4], SPAN), dtype=torch.int32, device=codes.device)
    for field in range(16 // bits):
        for half in range(2):
            words |= spans[..., field, :, half] << 16 * half + bits * field
    return words.flatten(3)


def pack_scales(scales: Tensor) -> Tensor:
    """Of groups: [O, G] → [N, P, 8, 2]; with minimums [O, G, 2] → [N, P, 2, 8, 2]."""
    panels = _in_panels(scales)
    return (panels if scales.dim() == 2 else panels.transpose(2, 3)).contiguous()


def bits_of(words: Tensor) -> int:
    return words.shape[3] // 2


def unpack_codes(words: Tensor) -> Tensor:
    """Words [N, P, 8, 2 · bits] → codes [8 N, 2 P, 32] from 0 to 2^bits − 1, int32."""
    bits = bits_of(words)
    spans = words.view(*words.shape[:3], -1, SPAN)
    halves = [
        torch.stack([spans >> 16 * half + bits * field & (1 << bits) - 1 for half in range(2)], -1)
        for field in range(16 // bits)
    ]
    codes = torch.stack(halves, 4)  # panel, pair, output, span, field, word, half
    return codes.transpose(1, 2).reshape(len(words) * PANEL, -1, GROUP)


def widened(words: Tensor, scales: Tensor, num_out: int, width: int) -> Tensor:
    """[O, C] float32: exactly what words and scales mean."""
    codes = unpack_codes(words)
    if scales.dim() == 4:
        factors = scales.transpose(1, 2).reshape(*codes.shape[:2]).float()
        values = (codes - 128).float() * factors[..., None]
    else:
        both = scales.permute(0, 3, 1, 2, 4).reshape(*codes.shape[:2], 2).float()
        values = codes.float() * both[..., :1] + both[..., 1:]
    return values.flatten(1)[:num_out, :width]


@op(
    tolerance={torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3},
    examples=_examples,
    rows=EachRow("x", "residual"),
)
def int_product(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    num_out: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """As `product`, for a weight [num_out, C] of integer codes and scales."""
    y = x.float()
    if eps > 0:
        y = rms_norm.reference(y, y.new_ones(y.shape[1]) if norm is None else norm, eps)
    return finished(y @ widened(words, scales, num_out, x.shape[1]).T, bias, residual, activation, gated).to(x.dtype)
