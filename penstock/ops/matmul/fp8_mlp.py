"""Gated MLP with FP8 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.fp8_product import fp8_product
from penstock.ops.registry import op


@op(tolerance={torch.float32: 5e-2, torch.bfloat16: 1e-1})
def fp8_mlp(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    gate: Epilogue,
    epilogue: Epilogue = NO_EPILOGUE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Return down · (act(gate · y) · (up · y)) → [T, C] for x[T, C], gate_up[2 F, C] and down[C, F], each product as in
    `fp8_product`, with a gated epilogue `gate` after the first. The rows between them are quantized to FP8 if there are
    several."""
    hidden = fp8_product.reference(x.float(), gate_up, gate_up_scale, gate, norm, eps)
    y = fp8_product.reference(hidden, down, down_scale, Epilogue(epilogue.bias))
    return (y if epilogue.residual is None else epilogue.residual + y).to(x.dtype)
