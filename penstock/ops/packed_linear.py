"""A matrix product with a packed weight, the activations rounded to 8 bits or as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock.ops.activation import finished
from penstock.ops.example import integers, normal
from penstock.ops.packed import FORMATS, GROUP, Format, PackedWeight
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachRow


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
            yield {"x": normal(seed, num_rows, width), "parts": _parts(number, format, num_out, width, gated),
                   "terms": (1, 0, 2, 1, 1, 2, 1)[seed], "bias": normal(seed + 5, num_out) if seed % 2 else None,
                   "residual": normal(seed + 6, num_rows, size) if seed % 3 == 1 else None,
                   "activation": kind, "gated": gated}
    yield {"x": normal(1, 0, 64), "parts": (packed_example(1, FORMATS["Q4_1"], 16, 64),), "terms": 1}


def rounded(x: Tensor, terms: int) -> Tensor:
    """x[T, C], every 32 values as a step times integers of −127 … 127 around the middle of their range.

    A second term does the same with what the first leaves over.
    """
    first = _rounded_groups(x)
    return first if terms == 1 else first + _rounded_groups(x - first)


def _rounded_groups(x: Tensor) -> Tensor:
    """A group at the end that is not whole is centered on zero."""
    num_rows, width = x.shape
    num_groups = -(-width // GROUP)
    groups = torch.nn.functional.pad(x, (0, -width % GROUP)).view(num_rows, num_groups, GROUP)
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    middle, reach = (low + high) / 2, (high - low) / 2
    if width % GROUP:
        middle[:, -1], reach[:, -1] = 0.0, groups[:, -1].abs().amax(dim=-1, keepdim=True)
    codes = torch.round((groups - middle) * torch.where(reach > 1e-30, 127.0 / reach, 0.0))
    return (codes * (reach / 127.0) + middle).view(num_rows, num_groups * GROUP)[:, :width]


@op(tolerance={torch.float32: 5e-5}, examples=_examples,
    rows=EachRow("x", "residual"))
def packed_linear(x: Tensor, parts: Sequence[PackedWeight], terms: int, bias: Tensor | None = None,
                  residual: Tensor | None = None, activation: str | None = None, gated: bool = False) -> Tensor:
    """residual + act(x[T, C] · weightᵀ + bias) → [T, O]; the weight's parts lie on top of each other.

    Activations are rounded to a sum of 1 or 2 `terms` of 8 bits, which are multiplied as integers, exactly within a
    group of 32; with 0 terms they are taken as they are. Gated, the first half of the weight's
    outputs is the gate of the second: act(gate) · up → [T, O/2].
    """
    x = x.float()
    y = (rounded(x, terms) if terms else x) @ torch.cat([part.unpacked() for part in parts]).T
    return finished(y, bias, residual, activation, gated)
