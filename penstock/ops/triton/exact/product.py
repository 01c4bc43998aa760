"""Deterministic GEMM: every output is one chain of sums over the inputs, in order.

On a tensor core, a chain gives the same bits whatever the tile and the instruction's other size. So a few rows, many
rows and, for 16-bit weights on Hopper, cuBLAS without split-K agree bit for bit (decision 0034).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.product import product
from penstock.ops.triton.launch import has_large_smem, is_hopper, pdl_options, wait_for_previous
from penstock.ops.triton.matmul.chain import find_columns, split_gates, sum_chain
from penstock.ops.triton.matmul.cublas import TYPES, GemmSize, list_unsplit, multiply
from penstock.ops.triton.matmul.epilogue import EpilogueArgs, apply_epilogue, epilogue_args
from penstock.ops.triton.norm import apply_norm
from penstock.ops.triton.sizes import cdiv
from penstock.ops.triton.tuning import (
    CHECKED_ROWS,
    EPILOGUE_BLOCK,
    EXACT_GROUP_TILES,
    MAX_EXACT_TRITON_ROWS,
    exact_tile,
    round_exact_rows,
)


@triton.jit
def _find_tile(num_rows, num_out, OUTS: tl.constexpr, ROWS: tl.constexpr, GROUP_TILES: tl.constexpr):
    """Return the first output and row of a program's tile. GROUP_TILES output tiles take turns over the rows, to share
    them in L2."""
    in_group = GROUP_TILES * tl.cdiv(num_rows, ROWS)
    first = tl.program_id(0) // in_group * GROUP_TILES
    size = tl.minimum(tl.cdiv(num_out, OUTS) - first, GROUP_TILES)
    place = tl.program_id(0) % in_group
    return (first + place % size) * OUTS, place // size * ROWS


@triton.jit(do_not_specialize=["num_rows"])
def _chain_gemm(
    x,
    weight,
    row_scales,
    scale,
    out,
    epilogue,
    num_rows,
    num_out,
    width,
    x_row,
    ROUNDED: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of outputs by rows; gated, half of the outputs are gates and half of them ups. EVEN: the width is a
    multiple of BLOCK. ROUNDED sums are rounded before the epilogue, as cuBLAS does."""
    wait_for_previous(PDL)
    OWN: tl.constexpr = OUTS // 2 if GATED else OUTS
    begin, first_row = _find_tile(num_rows, num_out, OWN, ROWS, GROUP_TILES)
    t, column = first_row + tl.arange(0, ROWS), find_columns(begin, num_out, OUTS, GATED)
    sums = sum_chain(
        weight + column.to(tl.int64) * width,
        x + t.to(tl.int64) * x_row,
        t < num_rows,
        width,
        OUTS,
        ROWS,
        BLOCK,
        EVEN,
        STAGES,
        PRECISION,
        "",
    )
    if scale is not None:
        row_scale = tl.load(row_scales + t, mask=t < num_rows, other=0.0)[None, :]
        sums = sums * row_scale * tl.load(scale + column)[:, None]
    if ROUNDED:
        sums = sums.to(out.dtype.element_ty).to(tl.float32)
    if epilogue.bias is not None:
        sums += tl.load(epilogue.bias + column).to(tl.float32)[:, None]
    y, up = split_gates(sums, OUTS, ROWS, GATED)
    n, line = (begin + tl.arange(0, OWN))[:, None], t.to(tl.int64)[None, :]
    inside = (n < num_out) & (t < num_rows)[None, :]
    rest = EpilogueArgs(None, epilogue.residual, epilogue.residual_row)
    residual_at = line * epilogue.residual_row + n
    y = apply_epilogue(y, up, rest, None, None, residual_at, inside, num_out, GATED, KIND, "")
    tl.store(out + line * num_out + n, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _finish(
    sums, out, epilogue, num_out, GATED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Apply the epilogue to rounded sums, as `_chain_gemm` does to its own."""
    wait_for_previous(PDL)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_out
    line = sums + t * num_out * (2 if GATED else 1)
    y = tl.load(line + n, mask=inside, other=0.0).to(tl.float32)
    up = y
    if GATED:
        up = tl.load(line + num_out + n, mask=inside, other=0.0).to(tl.float32)
    y = apply_epilogue(y, up, epilogue, n, inside, t * epilogue.residual_row + n, inside, num_out, GATED, KIND, "")
    tl.store(out + t * num_out + n, y.to(out.dtype.element_ty), mask=inside)


def _multiply_tiles(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    epilogue: Epilogue,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    tile_rows: int = 0,
) -> Tensor:
    """Multiply by our own kernel, in tiles of `tile_rows` rows, or as many as suit."""
    num_rows, (wide, width) = x.shape[0], weight.shape
    num_out = epilogue.num_results(wide)
    tile = exact_tile(tile_rows or num_rows, wide, x.itemsize, has_large_smem(x.device))
    own = tile.num_outs // 2 if epilogue.gated else tile.num_outs
    _chain_gemm[(cdiv(num_out, own) * cdiv(num_rows, tile.num_rows),)](
        x,
        weight,
        *scales,
        out,
        epilogue_args(epilogue),
        num_rows,
        num_out,
        width,
        x.stride(0),
        x.dtype in TYPES,
        epilogue.gated,
        epilogue.activation or "",
        *tile.sizes(width),
        EXACT_GROUP_TILES,
        "ieee",
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
        **pdl_options(x),
    )
    return out


class Unsplit:
    """cuBLAS's algorithm for each size, chosen when a product of that size first comes. It is used only if it gives
    the bits of our own kernel on random values."""

    def __init__(self) -> None:
        self._known: dict[tuple[GemmSize, bool], Any] = {}

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor, adds: bool) -> bool:
        """Write x · weightᵀ, plus what `out` holds if `adds`; return False if cuBLAS has no algorithm for it."""
        rows = round_exact_rows(x.shape[0])
        key = GemmSize(rows, weight.shape[0], weight.shape[1], x.dtype, x.device), adds
        if key not in self._known:
            if torch.cuda.is_current_stream_capturing():
                return False
            self._known[key] = self._choose(*key)
        algorithm = self._known[key]
        return algorithm is not None and multiply(algorithm, x, weight, out, adds)

    def _choose(self, size: GemmSize, adds: bool) -> Any:
        try:
            return next((one for one in list_unsplit(size) if self._agrees(one, size, adds)), None)
        except torch.OutOfMemoryError:  # no room for random weights: our own kernel needs none
            return None

    @staticmethod
    def _agrees(algorithm: Any, size: GemmSize, adds: bool) -> bool:
        chance = torch.Generator(size.device).manual_seed(size.num_rows)
        count = min(size.num_rows, CHECKED_ROWS)
        shapes = (count, size.width), (size.num_out, size.width), (count, size.num_out)
        x, weight, out = (torch.randn(one, generator=chance, device=size.device, dtype=size.dtype) for one in shapes)
        expected = _multiply_tiles(
            x, weight, out.clone(), Epilogue(residual=out) if adds else NO_EPILOGUE, tile_rows=MAX_EXACT_TRITON_ROWS
        )
        return multiply(algorithm, x, weight, out, adds) and torch.equal(out, expected)


UNSPLIT = Unsplit()


def _can_use_cublas(x: Tensor, weight: Tensor) -> bool:
    is_suited = x.shape[0] > MAX_EXACT_TRITON_ROWS and weight.dtype == x.dtype and x.dtype in TYPES
    return is_suited and x.device.type in ("cuda", "meta") and is_hopper(x.device)


def _multiply_by_cublas(x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> bool:
    """Multiply by cuBLAS, then apply what it does not; False if it has no algorithm for it."""
    is_bare = epilogue.bias is None and epilogue.activation is None and not epilogue.gated
    adds = is_bare and epilogue.residual is out
    is_plain = adds or (is_bare and epilogue.residual is None)
    sums = out if is_plain else torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    if x.device.type != "meta" and not UNSPLIT.multiply(x, weight, sums, adds):
        return False
    if not is_plain:
        _finish_sums(sums, out, epilogue)
    return True


def _finish_sums(sums: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    num_rows, num_out = out.shape
    _finish[(num_rows, cdiv(num_out, EPILOGUE_BLOCK))](
        sums,
        out,
        epilogue_args(epilogue),
        num_out,
        epilogue.gated,
        epilogue.activation or "",
        EPILOGUE_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
        **pdl_options(sums),
    )


def apply_exact_epilogue(sums: Tensor, epilogue: Epilogue) -> Tensor:
    """Apply the epilogue to sums[T, O] → [T, O], gated [T, O/2], written into the residual if it is contiguous."""
    residual = epilogue.residual
    if epilogue == NO_EPILOGUE or not sums.numel():
        return sums[:, : epilogue.num_results(sums.shape[1])]
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    out = residual
    if out is None or not out.is_contiguous() or out.dtype != sums.dtype:
        out = torch.empty((len(sums), epilogue.num_results(sums.shape[1])), dtype=sums.dtype, device=sums.device)
    _finish_sums(sums, out, epilogue._replace(residual=residual))
    return out


def exact_gemm(
    x: Tensor,
    weight: Tensor,
    epilogue: Epilogue,
    dtype: torch.dtype,
    row_scales: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Multiply as `product` without its norm; FP8 sums are multiplied by row_scales[T] and scale[O]."""
    out = residual = epilogue.residual
    if out is None or not out.is_contiguous() or out.dtype != dtype:
        out = torch.empty((x.shape[0], epilogue.num_results(weight.shape[0])), dtype=dtype, device=x.device)
    if not out.numel():
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        epilogue = epilogue._replace(residual=residual.contiguous())
    if _can_use_cublas(x, weight) and _multiply_by_cublas(x, weight, out, epilogue):
        return out
    return _multiply_tiles(x, weight, out, epilogue, (row_scales, scale))


@product.impl("cuda", exact=True)
def _body(
    x: Tensor, weight: Tensor, epilogue: Epilogue = NO_EPILOGUE, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    y = apply_norm(x, norm, eps) if eps > 0 else x
    return exact_gemm(y, weight, epilogue, x.dtype)
