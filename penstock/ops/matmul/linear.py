"""Matrix product with a weight stored as panels of 16 outputs, on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue, apply_epilogue
from penstock.ops.pages import make_room
from penstock.ops.registry import op

PANEL = 16  # outputs side by side: one SIMD lane owns one output


def pack_panels(weight: Tensor) -> Tensor:
    """[O, C] → [ceil(O/16), C, 16], padded with zeros."""
    num_out, width = weight.shape
    if num_out % PANEL:
        weight = torch.cat([weight, weight.new_zeros(-num_out % PANEL, width)])
    panels = weight.reshape(-1, PANEL, width).transpose(1, 2)
    return make_room(panels.shape, weight.dtype, weight.device).copy_(panels)


def unpack_panels(panels: Tensor, num_out: int) -> Tensor:
    """[ceil(O/16), C, 16] → [O, C]."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:num_out]


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3})
def linear(x: Tensor, panels: Tensor, num_out: int, epilogue: Epilogue = NO_EPILOGUE) -> Tensor:
    """Apply the epilogue to x[T, C] · weightᵀ → [T, O], gated [T, O/2]; sums are float32, over C in order."""
    y = x.float() @ unpack_panels(panels, num_out).float().T
    return apply_epilogue(y, epilogue).to(x.dtype)
