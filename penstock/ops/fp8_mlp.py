"""A gated MLP whose weights are 8-bit floats."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.example import normal
from penstock.ops.fp8_product import fp8_product, quantized
from penstock.ops.registry import Example, op
from penstock.ops.rows import EachRow


def _examples() -> Iterator[Example]:
    for seed, (num_rows, width, hidden) in enumerate([(1, 64, 48), (1, 1040, 32), (3, 32, 80), (40, 128, 160)]):
        gate_up, gate_up_scale = quantized(normal(seed, 2 * hidden, width, scale=width**-0.5))
        down, down_scale = quantized(normal(seed + 10, width, hidden, scale=hidden**-0.5))
        yield {
            "x": normal(seed + 20, num_rows, width, dtype=torch.bfloat16),
            "gate_up": gate_up,
            "gate_up_scale": gate_up_scale,
            "down": down,
            "down_scale": down_scale,
            "activation": "gelu_tanh" if seed == 2 else "silu",
            "gate_up_bias": normal(seed + 30, 2 * hidden) if seed % 2 else None,
            "down_bias": normal(seed + 40, width) if seed % 2 else None,
            "residual": normal(seed + 50, num_rows, width, dtype=torch.bfloat16) if seed else None,
            "norm": normal(seed + 60, width) if seed == 3 else None,
            "eps": 1e-5 if seed % 2 else 0.0,
        }


@op(tolerance={torch.float32: 5e-2, torch.bfloat16: 1e-1}, examples=_examples, rows=EachRow("x", "residual"))
def fp8_mlp(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """residual + down · (act(gate · y) · (up · y)) → [T, C] for x[T, C], gate_up[2 F, C] and down[C, F], each as in
    `fp8_product`: with more rows than one what goes into `down` is of 8-bit floats, too, with a scale for each row."""
    hidden = fp8_product.reference(x.float(), gate_up, gate_up_scale, gate_up_bias, None, activation, True, norm, eps)
    y = fp8_product.reference(hidden, down, down_scale, down_bias)
    return (y if residual is None else residual + y).to(x.dtype)
