"""On a CPU a fused call gives the bits of the ops it joins, so that lowering a model never changes its results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.ops import FORMATS
from penstock.ops.elementwise import ACTIVATIONS
from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.matmul.linear import pack_panels
from tests.ops.check import same_bits
from tests.ops.examples import integers, normal, permutation
from tests.ops.examples.attention import cache_pool
from tests.ops.examples.case import with_epilogue
from tests.ops.examples.matmul import packed_weight

EPS = 1e-5
NUM_ROWS = (1, 3, 40)
ENDS = [(None, False), *itertools.product(ACTIVATIONS, (False, True))]  # activation, gated
DENSE = (torch.float32, torch.bfloat16, torch.float16)
PACKED = list(itertools.product(FORMATS, (0, 8, 16)))

Product = Callable[..., Tensor]


def dense(dtype: torch.dtype, num_out: int, width: int) -> Product:
    panels = pack_panels(normal(1, num_out, width, scale=width**-0.5, dtype=dtype))
    return lambda x, **rest: ops.linear(x, panels, num_out, **with_epilogue(rest))


def packed(parts: list[tuple[str, int]], x_bits: int, width: int) -> Product:
    weights = [packed_weight(seed, FORMATS[format], num_out, width) for seed, (format, num_out) in enumerate(parts)]
    return lambda x, **rest: ops.packed_linear(x, weights, x_bits, **with_epilogue(rest))


def check_product(product: Product, num_out: int, width: int, can_norm: bool, can_gate: bool) -> None:
    """`product` with every prologue and epilogue, against rms_norm → product → add → activation → add."""
    bias, norm = normal(2, num_out), normal(3, width)
    for num_rows in NUM_ROWS:
        x = normal(num_rows, num_rows, width, scale=3.0)
        sums = [product(x), product(ops.rms_norm(x, norm, EPS))]
        for (kind, gated), has_norm, has_bias in itertools.product(ENDS, (False, True), (False, True)):
            if (has_norm and not can_norm) or (gated and not can_gate):
                continue
            y = ops.add(sums[has_norm], bias) if has_bias else sums[has_norm]
            if kind is not None:
                y = ops.gated_activation(y, kind) if gated else ops.activation(y, kind)
            residual = normal(4, *y.shape)
            fused = partial(product, x, activation=kind, gated=gated, bias=bias if has_bias else None)
            if has_norm:
                fused = partial(fused, norm=norm, eps=EPS)
            case = f"rows={num_rows} activation={kind} gated={gated} norm={has_norm} bias={has_bias}"
            assert same_bits(fused(), y), case
            assert same_bits(fused(residual=residual), ops.add(residual, y)), f"{case} residual"


@pytest.mark.parametrize("dtype", DENSE)
def test_a_dense_product(dtype: torch.dtype, path: str) -> None:
    check_product(dense(dtype, 96, 75), 96, 75, can_norm=False, can_gate=True)
    check_product(dense(dtype, 41, 64), 41, 64, can_norm=False, can_gate=False)


@pytest.mark.parametrize(("format", "x_bits"), PACKED)
def test_a_packed_product(format: str, x_bits: int, path: str) -> None:
    """16-bit activations have no gated kernel; their layers call gated_activation."""
    width = 256 if FORMATS[format].supers else 75
    check_product(packed([(format, 96)], x_bits, width), 96, width, can_norm=True, can_gate=x_bits != 16)
    check_product(packed([(format, 41)], x_bits, width), 41, width, can_norm=True, can_gate=False)
    parts = packed([(format, 32), ("Q8_0", 25)], x_bits, width)
    check_product(parts, 57, width, can_norm=True, can_gate=False)


@pytest.mark.parametrize("x_bits", (0, 8, 16))
def test_parts_of_a_packed_product(x_bits: int, path: str) -> None:
    x, whole = normal(1, 7, 256), packed([("Q4_K", 48), ("Q6_K", 32)], x_bits, 256)
    weights = [packed_weight(seed, FORMATS[format], n, 256) for seed, format, n in ((0, "Q4_K", 48), (1, "Q6_K", 32))]
    apart = torch.cat([ops.packed_linear(x, [weight], x_bits) for weight in weights], dim=1)
    assert same_bits(whole(x), apart)


@pytest.mark.parametrize("shape", [(1, 576), (5, 31), (7, 3, 64), (40, 1100)])
def test_a_norm_with_a_residual(shape: tuple[int, ...], path: str) -> None:
    x, residual = normal(1, *shape, scale=3.0) + 1, normal(2, *shape)
    weight, bias = normal(3, shape[-1]), normal(4, shape[-1])

    def add(y: Tensor) -> Tensor:
        return ops.add(residual.view(-1, shape[-1]), y.view(-1, shape[-1])).view(shape)

    assert same_bits(ops.rms_norm(x, weight, EPS, residual), add(ops.rms_norm(x, weight, EPS)))
    for b in (bias, None):
        assert same_bits(ops.layer_norm(x, weight, b, EPS, residual), add(ops.layer_norm(x, weight, b, EPS)))
    scaled = ops.layer_norm(x, weight, None, EPS).view(-1, shape[-1])
    assert same_bits(ops.layer_norm(x, weight, bias, EPS), ops.add(scaled, bias).view(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8])
@pytest.mark.parametrize(("norms", "rotated"), [("", 0), ("", 24), ("q", 40), ("k", 24), ("qk", 0), ("qk", 40)])
def test_qkv_write(dtype: torch.dtype, norms: str, rotated: int, path: str) -> None:
    num_heads, num_kv_heads, size, block = 6, 2, 40, 8
    for num_tokens in (1, 5, 90):
        qkv = normal(num_tokens, num_tokens, (num_heads + 2 * num_kv_heads) * size)
        slots, positions = permutation(1, 12 * block)[:num_tokens], integers(2, 50, num_tokens)
        weights: dict[str, Any] = {f"{name}_norm": normal(3, size) for name in norms}
        angles = normal(4, 50, rotated // 2, scale=2.0)
        turn: dict[str, Any] = {"cos": angles.cos(), "sin": angles.sin()} if rotated else {}
        caches: list[dict[str, Any]] = [cache_pool(12, num_kv_heads, block, size, dtype) for _ in range(2)]
        joint, apart = caches
        q = ops.qkv_write(qkv, **joint, slots=slots, positions=positions, eps=EPS, **weights, **turn)
        heads = qkv.view(num_tokens, -1, size)
        plain, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        plain = ops.rms_norm(plain, weights["q_norm"], EPS) if "q" in norms else plain
        k = ops.rms_norm(k, weights["k_norm"], EPS) if "k" in norms else k
        if rotated:
            plain, k = (ops.rope(x, positions, **turn) for x in (plain, k))
        ops.cache_write(k, v, **apart, slots=slots)
        assert same_bits(q, plain.contiguous())
        assert all(same_bits(joint[name], apart[name]) for name in joint)
        assert joint["v_cache"].any()


@pytest.mark.parametrize("format", [None, "Q4_K", "Q8_0", "Q6_K"])
def test_a_grouped_product(format: str | None, path: str) -> None:
    """Each row gives the bits of the plain product with its own matrix, and gates those of gated_activation."""
    count, num_out, width = 5, 96, 256
    parts = [packed_weight(seed, FORMATS[format or "Q8_0"], num_out, width) for seed in range(count)]
    dense = normal(1, count, num_out, width, scale=0.05)
    stack = _joined(parts)
    for num_rows in NUM_ROWS:
        x, ids = normal(num_rows, num_rows, width, scale=3.0), integers(num_rows, count, num_rows, 2).int()
        bias = normal(2, count * num_out)

        def run(kind: str | None, gated: bool) -> Tensor:
            epilogue = Epilogue(bias, kind, gated)  # noqa: B023
            if format is None:
                return ops.grouped_matmul(x, pack_panels(dense.flatten(0, 1)), ids, count, epilogue)  # noqa: B023
            return ops.grouped_packed_matmul(x, (stack,), ids, count, 8, epilogue)  # noqa: B023

        plain = run(None, False)
        for row, k in itertools.product(range(num_rows), range(2)):
            e = int(ids[row, k])
            own = Epilogue(bias.view(count, -1)[e])
            one = x[row : row + 1]
            y = (
                ops.linear(one, pack_panels(dense[e]), num_out, own)
                if format is None
                else ops.packed_linear(one, (parts[e],), 8, own)
            )
            assert same_bits(plain[row, k : k + 1], y)
        for kind in ("silu", "swiglu_oai"):
            assert same_bits(run(kind, True), ops.gated_activation(plain, kind)), kind


def _joined(parts: list[ops.PackedWeight]) -> ops.PackedWeight:
    first = parts[0]
    planes = {name: torch.cat([getattr(part, name) for part in parts]) for name in first.format.plane_bytes}
    return ops.PackedWeight(first.format, sum(part.num_out for part in parts), first.width, **planes)
