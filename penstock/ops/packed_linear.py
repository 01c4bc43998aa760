"""A matrix product with a packed weight, the activations rounded to 8 or 16 bits or as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock.ops.activation import finished
from penstock.ops.example import integers, normal
from penstock.ops.packed import FORMATS, GROUP, Format, PackedWeight
from penstock.ops.registry import Example, op
from penstock.ops.rms_norm import rms_norm
from penstock.ops.rows import EachRow

LIMITS = {8: 127.0, 16: 127.0 * 256.0}  # of the integers that activations are rounded to


def packed_example(seed: int, format: Format, num_out: int, width: int) -> PackedWeight:
    """Random codes, every one of them possible, with scales of ordinary size."""
    weight = PackedWeight.empty(format, num_out, width)
    for plane in (weight.codes, weight.high):
        plane.copy_(integers(seed, 256, *plane.shape))
    scale = 0.1 / (256 if format.levels else 2**format.bits)
    halves = (weight.supers if format.supers else weight.scales).view(torch.float16)
    halves.copy_(normal(seed + 2, *halves.shape, scale=scale / 32 if format.supers else scale))
    if format.supers:
        weight.scales.copy_(integers(seed + 1, 64, *weight.scales.shape))
    return weight


def _parts(seed: int, format: Format, num_out: int, width: int, gated: bool) -> tuple[PackedWeight, ...]:
    """One weight, or a large part of that format with a small one of 8 bits after it."""
    if gated or num_out < 48:
        return (packed_example(seed, format, num_out, width),)
    last = packed_example(seed + 3, FORMATS["Q8_0"], 16, width)
    return packed_example(seed, format, num_out - 16, width), last


def _examples() -> Iterator[Example]:
    shapes = [(1, 64, 33), (2, 576, 48), (4, 32, 16), (3, 96, 20), (7, 320, 64), (13, 544, 96), (40, 256, 96)]
    for number, format in enumerate(FORMATS.values()):
        for seed, (num_rows, width, num_out) in enumerate(shapes):
            if format.supers:
                width = -(-width // 256) * 256
            gated = seed in (4, 6)
            kind = {3: "relu", 4: "silu", 6: "gelu_tanh"}.get(seed)
            size = num_out // 2 if gated else num_out
            yield {
                "x": normal(seed, num_rows, width),
                "parts": _parts(number, format, num_out, width, gated),
                "x_bits": (8, 0, 16, 8, 8, 16, 8)[seed],
                "bias": normal(seed + 5, num_out) if seed % 2 else None,
                "residual": normal(seed + 6, num_rows, size) if seed % 3 == 1 else None,
                "activation": kind,
                "gated": gated,
                "norm": normal(seed + 7, width) if seed % 2 else None,
                "eps": 1e-5,
            }
    yield {"x": normal(1, 0, 64), "parts": (packed_example(1, FORMATS["Q4_1"], 16, 64),), "x_bits": 8}


def rounded(x: Tensor, x_bits: int) -> Tensor:
    """x[T, C], every 32 values as a step times integers: of 8 bits around the middle of their range, of 16 around zero.

    A group at the end that is not whole is centered on zero.
    """
    num_rows, width = x.shape
    num_groups = -(-width // GROUP)
    groups = torch.nn.functional.pad(x, (0, -width % GROUP)).view(num_rows, num_groups, GROUP)
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    middle, reach = (low + high) / 2, (high - low) / 2
    zero = slice(0 if x_bits == 16 else width // GROUP, num_groups)
    middle[:, zero], reach[:, zero] = 0.0, groups[:, zero].abs().amax(dim=-1, keepdim=True)
    limit = LIMITS[x_bits]
    codes = torch.round((groups - middle) * torch.where(reach > 1e-30, limit / reach, 0.0))
    return (codes * (reach / limit) + middle).view(num_rows, num_groups * GROUP)[:, :width]


@op(tolerance={torch.float32: 5e-5}, examples=_examples, rows=EachRow("x", "residual"))
def packed_linear(
    x: Tensor,
    parts: Sequence[PackedWeight],
    x_bits: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """residual + act(x[T, C] · weightᵀ + bias) → [T, O]; the weight's parts lie on top of each other.

    With `norm`[C] the rows of x are first RMS-normed with these weights.

    Activations are rounded to integers of `x_bits` bits, 8 or 16, which are multiplied exactly within a group of 32;
    with 0 they are taken as they are. Gated, the first half of the weight's outputs is the gate of the second:
    act(gate) · up → [T, O/2].
    """
    x = x.float() if norm is None else rms_norm.reference(x.float(), norm, eps)
    y = (rounded(x, x_bits) if x_bits else x) @ torch.cat([part.unpacked() for part in parts]).T
    return finished(y, bias, residual, activation, gated)
