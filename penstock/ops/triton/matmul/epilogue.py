"""The epilogue of every matrix product on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.triton.numbers import apply_activation, apply_gate


class EpilogueArgs(NamedTuple):
    """The tensors of an `Epilogue` as kernels take them; the activation and the gate are compile-time arguments."""

    bias: Any
    residual: Any
    residual_row: int


def epilogue_args(epilogue: Epilogue) -> EpilogueArgs:
    """Return the kernel arguments; the residual's last dimension must be contiguous."""
    residual = epilogue.residual
    return EpilogueArgs(epilogue.bias, residual, 0 if residual is None else residual.stride(0))


@triton.jit
def apply_epilogue(
    y,
    up,
    epilogue,
    out_at,
    out_mask,
    residual_at,
    residual_mask,
    num_out,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """residual + act(y + bias), or residual + act(y + bias) · (up + bias): `out_at` says which outputs y are, and
    `residual_at` where their residuals are. Masks may be None."""
    if epilogue.bias is not None:
        y += tl.load(epilogue.bias + out_at, mask=out_mask, eviction_policy=EVICTION).to(tl.float32)
        if GATED:
            up += tl.load(epilogue.bias + num_out + out_at, mask=out_mask, eviction_policy=EVICTION).to(tl.float32)
    if GATED:
        y = apply_gate(y, up, KIND)
    else:
        y = apply_activation(y, KIND)
    if epilogue.residual is not None:
        y += tl.load(epilogue.residual + residual_at, mask=residual_mask).to(tl.float32)
    return y
