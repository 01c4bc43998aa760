from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.product import can_defer_norm, is_skinny, product
from penstock.ops.triton.elementwise import activate
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.matmul.cublas import gemm
from penstock.ops.triton.matmul.epilogue import apply_epilogue, epilogue_args
from penstock.ops.triton.matmul.skinny import skinny_gemm
from penstock.ops.triton.norm import apply_norm
from penstock.ops.triton.sizes import cdiv
from penstock.ops.triton.tuning import MAX_GATED_GEMV_WIDTH, gemv_shape


@triton.jit
def _load_weights(place, at, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load weights that are used once; those beyond the width are 0."""
    if BLOCK > WIDTH:
        w = tl.load(place, mask=(at < WIDTH)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        w = tl.load(place, eviction_policy="evict_first")
    return w


@triton.jit
def _gemv(
    x,
    weight,
    scale,
    norm,
    out,
    epilogue,
    num_out,
    eps,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row times ROWS outputs. A program loads its weights, or the first block of them, before it waits for x; the
    norm's factor is applied to the sums, so that x is read once."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, num_out - 1).to(tl.int64)  # beyond the last it is the last once more
    at = tl.arange(0, BLOCK)
    place = weight + row[:, None] * WIDTH + at[None, :]
    second = weight + (row + num_out)[:, None] * WIDTH + at[None, :]
    w = _load_weights(place, at, WIDTH, BLOCK)
    u = w
    if GATED:
        u = _load_weights(second, at, WIDTH, BLOCK)
    factors = 1.0
    if scale is not None:
        factors = tl.load(scale + row)
    wait_for_previous(PDL)
    values = tl.load(x + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    squares = values * values
    if norm is not None:
        values *= tl.load(norm + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    sums = w.to(tl.float32) * values[None, :]
    ups = sums
    if GATED:
        ups = u.to(tl.float32) * values[None, :]
    for start in tl.static_range(BLOCK, WIDTH, BLOCK):
        inside = start + at < WIDTH
        w = tl.load(place + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        values = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        squares += values * values
        if norm is not None:
            values *= tl.load(norm + start + at, mask=inside, other=0.0).to(tl.float32)
        sums += w.to(tl.float32) * values[None, :]
        if GATED:
            u = tl.load(second + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            ups += u.to(tl.float32) * values[None, :]
    y = tl.sum(sums, 1)
    ups_sum = tl.sum(ups, 1)
    if NORMED:
        factor = tl.rsqrt(tl.sum(squares) / WIDTH + eps)
        y *= factor
        ups_sum *= factor
    if scale is not None:
        y *= factors
        if GATED:
            ups_sum *= tl.load(scale + num_out + row)
    y = apply_epilogue(y, ups_sum, epilogue, row, None, row, None, num_out, GATED, KIND, "")
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < num_out)


def gemv(
    x: Tensor, weight: Tensor, epilogue: Epilogue, norm: Tensor | None, eps: float, scale: Tensor | None = None
) -> Tensor:
    """Multiply one row with a weight whose outputs are times scale[O], if given. Wide gated products are faster as a
    plain GEMV and an activation kernel."""
    num_out, width = epilogue.num_results(weight.shape[0]), weight.shape[1]
    if epilogue.gated and width > MAX_GATED_GEMV_WIDTH:
        y = _apply_gate(gemv(x, weight, Epilogue(epilogue.bias), norm, eps, scale), epilogue.activation)
        return y if epilogue.residual is None else epilogue.residual.add_(y)
    out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    rows, block, num_warps = gemv_shape(width, weight.itemsize)
    rows = rows // 2 if epilogue.gated and rows > 1 else rows
    _gemv[(cdiv(num_out, rows),)](
        x,
        weight,
        scale,
        norm,
        out,
        epilogue_args(epilogue),
        num_out,
        eps,
        eps > 0,
        epilogue.gated,
        epilogue.activation or "",
        width,
        rows,
        block,
        num_warps=num_warps,
        **pdl_options(x),
    )
    return out


def _apply_gate(y: Tensor, activation: str | None) -> Tensor:
    gate, up = y.chunk(2, -1)
    return activate(y, activation, gated=True) if activation else gate * up


@product.impl("cuda", exact=False)
def _body(
    x: Tensor, weight: Tensor, epilogue: Epilogue = NO_EPILOGUE, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Use a fused GEMV for one row, a fused skinny GEMM for a few, cuBLAS for more."""
    if x.shape[0] == 1 and x.is_contiguous():
        return gemv(x, weight, epilogue, norm, eps)
    if is_skinny(x, weight, norm):
        return skinny_gemm(x, weight, epilogue, eps)
    bias, activation, gated, residual = epilogue
    if gated and activation is not None and can_defer_norm(x, norm, bias, eps):
        y = activate(gemm(x, weight), activation, True, x, eps)
        return y if residual is None else residual.add_(y)
    y = apply_norm(x, norm, eps) if eps > 0 else x
    if bias is None and residual is not None and not gated and activation is None:
        return torch.addmm(residual, y, weight.t(), out=residual)
    y = gemm(y, weight) if bias is None else torch.addmm(bias.to(y.dtype), y, weight.t())
    if gated:
        y = _apply_gate(y, activation)
    elif activation is not None:
        y = activate(y, activation, gated=False)
    return y if residual is None else residual.add_(y)
