from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.fp8_product import FP8, LARGEST, MIN_LARGEST, fp8_product
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.matmul.epilogue import apply_epilogue, epilogue_args
from penstock.ops.triton.matmul.product import gemv
from penstock.ops.triton.sizes import cdiv, power_of_2
from penstock.ops.triton.tuning import EPILOGUE_BLOCK

CODE_SCALE = 2.0**-9  # of both sides' codes, so that their sums stay within float16's range
_LARGEST, _MIN_LARGEST, _UNSCALE = tl.constexpr(LARGEST), tl.constexpr(MIN_LARGEST), tl.constexpr(CODE_SCALE**-2)


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_quantized(y, out, scales, row, at, inside, width):
    """Store a row y as FP8 and its scale, largest / 448. NaN and infinity pass into the scale."""
    scale = _maximum(tl.reduce(tl.abs(y), 0, _maximum), _MIN_LARGEST) / _LARGEST
    tl.store(out + row * width + at, (y / scale).to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _quantize_rows(
    x, norm, out, scales, x_row, width, eps, NORMED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Norm a row and store it as FP8."""
    wait_for_previous(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < width
    y = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        y *= tl.rsqrt(tl.sum(y * y) / width + eps)
    if norm is not None:
        y *= tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    _store_quantized(y, out, scales, row, at, inside, width)


@triton.jit
def _load_scaled(line, row_scale, scale, n, inside):
    """Load sums of one row's codes, times both scales. Every row reads the weight's scales: only they stay in L1."""
    y = tl.load(line + n, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return y * (row_scale * tl.load(scale + n, mask=inside, other=0.0, eviction_policy="evict_last"))


@triton.jit
def _fp8_epilogue(
    sums,
    scales,
    scale,
    out,
    new_scales,
    epilogue,
    num_out,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scale the sums of codes and apply the epilogue; with `new_scales` quantize the row again."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_out
    row_scale = tl.load(scales + row) * _UNSCALE
    line = sums + row * num_out * (2 if GATED else 1)
    y = _load_scaled(line, row_scale, scale, n, inside)
    up = y
    if GATED:
        up = _load_scaled(line, row_scale, scale, num_out + n, inside)
    residual_at = row * epilogue.residual_row + n
    y = apply_epilogue(y, up, epilogue, n, inside, residual_at, inside, num_out, GATED, KIND, "evict_last")
    if new_scales is not None:
        _store_quantized(tl.where(inside, y, 0.0), out, new_scales, row, n, inside, num_out)
    else:
        tl.store(out + row * num_out + n, y.to(out.dtype.element_ty), mask=inside)


def _row_shape(width: int) -> tuple[int, int]:
    """Return block and warps of a program that holds a whole row: 16 values per thread."""
    block = power_of_2(width)
    return block, min(32, max(1, block // 512))


def quantize_rows(x: Tensor, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Norm rows of x and return them as FP8 codes and a scale each."""
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(x.shape[0], device=x.device)
    block, num_warps = _row_shape(x.shape[1])
    _quantize_rows[(x.shape[0],)](
        x, norm, codes, scales, x.stride(0), x.shape[1], eps, eps > 0, block, num_warps=num_warps, **pdl_options(x)
    )
    return codes, scales


@lru_cache(maxsize=16)
def _code_scale(device: torch.device) -> Tensor:
    return torch.full((), CODE_SCALE, device=device)


def fp8_gemm(codes: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply codes by cuBLAS, without scales: with them it is slower than the epilogue kernel. `use_fast_accum` keeps
    the hardware's accumulator."""
    scale = _code_scale(codes.device)
    return torch._scaled_mm(codes, weight.t(), scale_a=scale, scale_b=scale, out_dtype=dtype, use_fast_accum=True)


def apply_fp8_epilogue(sums: Tensor, scales: Tensor, scale: Tensor, epilogue: Epilogue) -> Tensor:
    """Scale sums[T, O] by scales[T] and scale[O] and apply the epilogue, into the residual if there is one."""
    num_out = epilogue.num_results(sums.shape[1])
    residual = None if epilogue.residual is None else epilogue.residual.contiguous()
    out = torch.empty((sums.shape[0], num_out), dtype=sums.dtype, device=sums.device) if residual is None else residual
    _fp8_epilogue[(sums.shape[0], cdiv(num_out, EPILOGUE_BLOCK))](
        sums,
        scales,
        scale,
        out,
        None,
        epilogue_args(epilogue._replace(residual=residual)),
        num_out,
        epilogue.gated,
        epilogue.activation or "",
        EPILOGUE_BLOCK,
        num_warps=4,
        **pdl_options(sums),
    )
    return out


def quantize_gated(sums: Tensor, scales: Tensor, scale: Tensor, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
    """Apply a gated epilogue and return codes and scales for the next product."""
    num_out = sums.shape[1] // 2
    codes = torch.empty((sums.shape[0], num_out), dtype=FP8, device=sums.device)
    new_scales = torch.empty(sums.shape[0], device=sums.device)
    block, num_warps = _row_shape(num_out)
    _fp8_epilogue[(sums.shape[0], 1)](
        sums,
        scales,
        scale,
        codes,
        new_scales,
        epilogue_args(epilogue),
        num_out,
        True,
        epilogue.activation or "",
        block,
        num_warps=num_warps,
        **pdl_options(sums),
    )
    return codes, new_scales


@fp8_product.impl("cuda", exact=False)
def _body(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    epilogue: Epilogue = NO_EPILOGUE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    if x.shape[0] == 1 and x.is_contiguous():
        return gemv(x, weight, epilogue, norm, eps, scale)
    codes, scales = quantize_rows(x, norm, eps)
    return apply_fp8_epilogue(fp8_gemm(codes, weight, x.dtype), scales, scale, epilogue)
