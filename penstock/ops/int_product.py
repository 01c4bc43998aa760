"""A matrix product with a weight of 8- or 4-bit integers, and what stands before and after it.

How a GPU holds such a weight [O, C], in G = ceil(C/32) groups of 32 inputs: as words[O, G, bits] of 32 bits, and scales
of float16. With 8 bits scales[O, G] has a scale for each group, and a value is scale · (code − 128); with 4 bits
scales[O, G, 2] has a minimum, too, and a value is scale · code + minimum.

Four words, which a thread reads at once, are a *unit*: 16 inputs in 8 bits, 32 in 4. Field i of word j in a unit, the
lowest bits being field 0, is the code of input 4 i + j: so the inputs that meet field i of a thread's four words lie
side by side.
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

UNIT = 4                       # words
TILES = (16, 32, 64, 128)      # rows that a GPU multiplies at a time
FEW = 256                      # rows; for more the weight is widened first
SCRATCH_BYTES = 128 << 20      # where it is, so much at a time


def int_example(seed: int, bits: int, num_out: int, width: int) -> tuple[Tensor, Tensor]:
    """Words and scales of values around 0, about width^-0.5 in size."""
    groups, size = -(-width // GROUP), width**-0.5
    words = (integers(seed, 1 << 32, num_out, groups, bits) - (1 << 31)).int()
    if bits == 8:
        return words, normal(seed + 1, num_out, groups, scale=size / 80, dtype=torch.float16).abs()
    scale = normal(seed + 1, num_out, groups, scale=size / 5).abs()
    return words, torch.stack([scale, -7.5 * scale + normal(seed + 2, num_out, groups, scale=size / 5)], -1).half()


def _examples() -> Iterator[Example]:
    assert product.examples is not None
    for number, example in enumerate(product.examples()):
        num_out, width = example.pop("weight").shape
        for bits in (8, 4):
            words, scales = int_example(number, bits, num_out, width)
            yield {"x": example["x"], "words": words, "scales": scales, **example}


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes [O, G, 32] from 0 to 2^bits − 1 → words [O, G, bits]."""
    fields = codes.view(*codes.shape[:2], bits // UNIT, 32 // bits, UNIT).to(torch.int32)
    words = torch.zeros_like(fields[..., 0, :])
    for i in range(32 // bits):
        words |= fields[..., i, :] << bits * i
    return words.flatten(2)


def unpack_words(words: Tensor) -> Tensor:
    """Words [O, G, bits] → codes [O, G, 32] from 0 to 2^bits − 1, int32."""
    bits = words.shape[2]
    units = words.view(*words.shape[:2], bits // UNIT, 1, UNIT)
    fields = [units >> bits * i & (1 << bits) - 1 for i in range(32 // bits)]
    return torch.cat(fields, -2).flatten(2)


def widened(words: Tensor, scales: Tensor, width: int) -> Tensor:
    """[O, C] float32: exactly what words and scales mean."""
    codes = unpack_words(words)
    if scales.dim() == 2:
        values = (codes - 128).float() * scales.float()[..., None]
    else:
        values = codes.float() * scales[..., :1].float() + scales[..., 1:].float()
    return values.flatten(1)[:, :width]


@op(tolerance={torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}, examples=_examples,
    rows=EachRow("x", "residual"))
def int_product(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
                activation: str | None = None, gated: bool = False, norm: Tensor | None = None, eps: float = 0.0,
                ) -> Tensor:
    """As `product`, for a weight [O, C] of integer codes and scales."""
    y = x.float()
    if eps > 0:
        y = rms_norm.reference(y, y.new_ones(y.shape[1]) if norm is None else norm, eps)
    return finished(y @ widened(words, scales, x.shape[1]).T, bias, residual, activation, gated).to(x.dtype)
