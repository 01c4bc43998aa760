"""Examples of matrix products, and weights to make more of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock import ops
from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.matmul.fp8_product import can_store, quantize_fp8
from penstock.ops.matmul.int_product import pack_codes, pack_scales
from penstock.ops.matmul.levels import FLOAT_LEVELS
from penstock.ops.matmul.packed import FORMATS, GROUP, Format, PackedWeight
from penstock.ops.registry import Example
from tests.ops.examples.case import examples, integers, normal, with_epilogue
from tests.ops.examples.rows import EachRow


class EachProductRow(EachRow):
    """Dimension 0 of x, of the epilogue's residual, and of the result."""

    def take(self, example: Example, keep: list[int]) -> Example:
        taken, epilogue = super().take(example, keep), example.get("epilogue")
        if epilogue is None or epilogue.residual is None:
            return taken
        return taken | {"epilogue": epilogue._replace(residual=epilogue.residual[keep].contiguous())}


@examples(ops.linear, EachProductRow("x"))
def _linear() -> Iterator[Example]:
    shapes = [
        (0, 8, 16),
        (1, 576, 192),
        (1, 31, 1),
        (2, 64, 33),
        (5, 17, 48),
        (7, 1, 16),
        (13, 100, 130),
        (64, 48, 64),
        (129, 33, 49),
        (50, 576, 200),
        (70, 4096, 40),
    ]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for seed, (num_rows, width, num_out) in enumerate(shapes):
            weight = normal(seed, num_out, width, scale=width**-0.5, dtype=dtype)
            gated = num_out % 32 == 0
            size = num_out // 2 if gated else num_out
            yield with_epilogue(
                {
                    "x": normal(seed + 100, num_rows, width),
                    "panels": ops.pack_panels(weight),
                    "num_out": num_out,
                    "bias": normal(seed + 200, num_out) if seed % 2 else None,
                    "residual": normal(seed + 300, num_rows, size) if seed % 3 == 1 else None,
                    "activation": {0: "silu", 2: "relu"}.get(seed % 5),
                    "gated": gated,
                }
            )


@examples(ops.product, EachProductRow("x"))
def _product() -> Iterator[Example]:
    shapes = [
        (1, 576, 192),
        (1, 31, 6),
        (1, 2048, 40),
        (2, 64, 34),
        (5, 17, 48),
        (1, 1, 16),
        (40, 128, 64),
        (1, 5000, 8),
    ]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for seed, (num_rows, width, num_out) in enumerate(shapes):
            gated = seed % 2 == 0
            size = num_out // 2 if gated else num_out
            yield with_epilogue(
                {
                    "x": normal(seed + 100, num_rows, width, dtype=dtype),
                    "weight": normal(seed, num_out, width, scale=width**-0.5, dtype=dtype),
                    "bias": normal(seed + 200, num_out) if seed % 3 == 1 else None,
                    "residual": normal(seed + 300, num_rows, size, dtype=dtype) if seed % 3 != 2 else None,
                    "activation": {0: "silu", 2: "relu2", 4: "gelu_tanh"}.get(seed % 5),
                    "gated": gated,
                    "norm": normal(seed + 400, width) if seed % 4 < 2 else None,
                    "eps": 1e-5 if seed % 4 < 3 else 0.0,
                }
            )


@examples(ops.fp8_product, EachProductRow("x"))
def _fp8_product() -> Iterator[Example]:
    for example in _product():
        if example["x"].dtype == torch.bfloat16 and can_store(*example["weight"].shape):
            weight, scale = quantize_fp8(example.pop("weight").float())
            yield {"x": example.pop("x"), "weight": weight, "scale": scale, **example}


def fp8_groups(seed: int, num_out: int, width: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales [groups, O] of a random weight."""
    weight = normal(seed, num_out, width, scale=width**-0.5)
    padded = torch.nn.functional.pad(weight, (0, -width % group)).view(num_out, -1, group)
    codes, scale = quantize_fp8(padded.flatten(0, 1))
    return codes.view(num_out, -1)[:, :width].contiguous(), scale.view(num_out, -1).t().contiguous()


@examples(ops.fp8_group_product, EachProductRow("x"))
def _fp8_group_product() -> Iterator[Example]:
    for number, example in enumerate(_product()):
        num_out, width = example.pop("weight").shape
        if can_store(num_out, width):
            weight, scale = fp8_groups(number, num_out, width, (32, 64, 128)[number % 3])
            yield {
                "x": example.pop("x"),
                "weight": weight,
                "scale": scale,
                "group": (32, 64, 128)[number % 3],
                **example,
            }


@examples(ops.fp8_mlp, EachProductRow("x"))
def _fp8_mlp() -> Iterator[Example]:
    for seed, (num_rows, width, hidden) in enumerate([(1, 64, 48), (1, 1040, 32), (3, 32, 80), (40, 128, 160)]):
        gate_up, gate_up_scale = quantize_fp8(normal(seed, 2 * hidden, width, scale=width**-0.5))
        down, down_scale = quantize_fp8(normal(seed + 10, width, hidden, scale=hidden**-0.5))
        yield {
            "x": normal(seed + 20, num_rows, width, dtype=torch.bfloat16),
            "gate_up": gate_up,
            "gate_up_scale": gate_up_scale,
            "down": down,
            "down_scale": down_scale,
            "gate": Epilogue(
                normal(seed + 30, 2 * hidden) if seed % 2 else None, "gelu_tanh" if seed == 2 else "silu", True
            ),
            "epilogue": Epilogue(
                normal(seed + 40, width) if seed % 2 else None,
                residual=normal(seed + 50, num_rows, width, dtype=torch.bfloat16) if seed else None,
            ),
            "norm": normal(seed + 60, width) if seed == 3 else None,
            "eps": 1e-5 if seed % 2 else 0.0,
        }


def packed_weight(seed: int, format: Format, num_out: int, width: int) -> PackedWeight:
    """Random codes, every one of them possible, with scales of ordinary size."""
    weight = PackedWeight.empty(format, num_out, width)
    for plane in (weight.codes, weight.high):
        plane.copy_(integers(seed, 256, *plane.shape))
    reach = max(FLOAT_LEVELS[format.levels]) if format.levels else 2 ** (format.bits - 1)
    scale = 0.05 / reach
    kind = torch.float32 if format.whole else torch.float16
    plane = weight.supers if format.supers else weight.scales[..., : -16 if format.zeros else None]
    values = normal(seed + 2, *plane.shape[:-1], plane.shape[-1] // kind.itemsize, scale=scale, dtype=kind)
    plane.copy_((values / 32 if format.supers else values).view(torch.uint8))
    if format.zeros:
        weight.scales[..., -16:].copy_(integers(seed + 1, 256 if format.bits == 8 else 16, *plane.shape[:-1], 16))
    if format.supers:
        weight.scales.copy_(integers(seed + 1, 64, *weight.scales.shape))
    return weight


def _parts(seed: int, format: Format, num_out: int, width: int, gated: bool) -> tuple[PackedWeight, ...]:
    """One weight, or a large part of that format with a small one of 8 bits after it."""
    if gated or num_out < 48:
        return (packed_weight(seed, format, num_out, width),)
    last = packed_weight(seed + 3, FORMATS["Q8_0"], 16, width)
    return packed_weight(seed, format, num_out - 16, width), last


@examples(ops.packed_linear, EachProductRow("x"))
def _packed_linear() -> Iterator[Example]:
    shapes = [(1, 64, 33), (2, 576, 48), (4, 32, 16), (3, 96, 20), (7, 320, 64), (13, 544, 96), (40, 256, 96)]
    for number, format in enumerate(FORMATS.values()):
        for seed, (num_rows, width, num_out) in enumerate(shapes):
            if format.supers:
                width = -(-width // 256) * 256
            gated = seed in (4, 6)
            kind = {3: "relu", 4: "silu", 6: "gelu_tanh"}.get(seed)
            size = num_out // 2 if gated else num_out
            yield with_epilogue(
                {
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
            )
    yield {"x": normal(1, 0, 64), "parts": (packed_weight(1, FORMATS["Q4_1"], 16, 64),), "x_bits": 8}


@examples(ops.packed_rows)
def _packed_rows() -> Iterator[Example]:
    for seed, format in enumerate(FORMATS.values()):
        num_rows, width = 50 + seed, 256 if format.supers else 96
        yield {"ids": integers(seed, num_rows, 5 * seed), "weight": packed_weight(seed, format, num_rows, width)}


def int_weight(seed: int, bits: int, num_out: int, width: int, sets: int | None = None) -> tuple[Tensor, Tensor]:
    """Words and scales of values around 0, about width^-0.5 in size."""
    groups, size = -(-width // GROUP), width**-0.5
    sets = (0 if bits == 8 else 2) if sets is None else sets
    shape = (num_out, groups, 2) if sets == 4 else (num_out, groups)
    codes = integers(seed, 1 << bits, num_out, groups, GROUP)
    scale = normal(seed + 1, *shape, scale=size / (80 if bits == 8 else 5)).abs()
    if sets:
        offset = normal(seed + 2, *shape, scale=size / 5)
        scale = torch.stack([scale, offset if bits == 8 else offset - 7.5 * scale], -1)
    return pack_codes(codes, bits), pack_scales(scale.half())


@examples(ops.int_product, EachProductRow("x"))
def _int_product() -> Iterator[Example]:
    for number, example in enumerate(_product()):
        num_out, width = example.pop("weight").shape
        for bits in (8, 4):
            words, scales = int_weight(number, bits, num_out, width)
            yield {"x": example["x"], "words": words, "scales": scales, "num_out": num_out, **example}


@examples(ops.int_rows)
def _int_rows() -> Iterator[Example]:
    for seed, (num_rows, width, count) in enumerate([(50, 96, 7), (9, 2048, 1), (33, 80, 40), (4, 576, 0)]):
        for bits in (8, 4):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                words, scales = int_weight(seed, bits, num_rows, width)
                ids = integers(seed, num_rows, 2 * count)[::2] if seed % 2 == 0 else integers(seed, num_rows, count)
                yield {"ids": ids, "words": words, "scales": scales, "width": width, "dtype": dtype}
