"""Products of a layer's matrices in 16 bits, 8-bit floats and integers, with what the layer has them do besides: norm,
activation, residual."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bench.op_inputs import BF16, EPS, Call, Inputs, OpCase
from penstock import ops
from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.matmul.fp8_product import quantize_fp8
from penstock.ops.matmul.int_product import empty_ints
from penstock.ops.matmul.packed import GROUP

NORMED = ("qkv", "gate_up")  # matrices whose inputs are


class Products(Inputs):
    def _rows_of(self, matrix: str, all_rows: Sequence[int]) -> list[int]:
        """A step has few logits."""
        return [rows for rows in all_rows if matrix != "head" or rows <= max(self.sizes.sampled)]

    def product(self) -> Iterator[OpCase]:
        """Each matrix with what the layer has it do besides: norm, activation, residual."""
        for matrix, (num_out, num_in) in self.shape.matrices().items():
            weights = [
                self._normal(num_out, num_in, scale=num_in**-0.5) for _ in range(self._num_sets(2 * num_out * num_in))
            ]
            for rows in self._rows_of(matrix, self.sizes.product_rows):
                num = min(len(weights), self._num_sets(2 * (num_out * num_in + rows * num_in)))
                xs = [self._normal(rows, num_in) for _ in range(num)]
                calls = [
                    partial(ops.product, x, w, *_around(matrix, self._added(matrix, rows, num_out)))
                    for x, w in zip(xs, weights)
                ]
                plain: list[Call] = [partial(torch.mm, x, w.t()) for x, w in zip(xs, weights)]
                yield OpCase(
                    "product",
                    self.shape.name,
                    f"{matrix} {num_out}×{num_in}, {rows} rows",
                    calls,
                    2.0 * (num_out * num_in + rows * (num_in + num_out)),
                    2.0 * rows * num_out * num_in,
                    {"torch.mm": plain},
                )

    def fp8_product(self) -> Iterator[OpCase]:
        one = torch.ones((), device=self.device)
        for matrix, (num_out, num_in) in self.shape.matrices().items():
            if matrix == "head":
                continue
            weights = [
                quantize_fp8(self._normal(num_out, num_in, scale=num_in**-0.5))
                for _ in range(self._num_sets(num_out * num_in))
            ]
            for rows in self.sizes.product_rows:
                num = min(len(weights), self._num_sets(num_out * num_in + 2 * rows * num_in))
                xs = [self._normal(rows, num_in) for _ in range(num)]
                calls = [
                    partial(ops.fp8_product, x, w, scale, *_around(matrix, self._added(matrix, rows, num_out)))
                    for x, (w, scale) in zip(xs, weights)
                ]
                plain: list[Call] = (
                    [
                        partial(torch._scaled_mm, x.to(w.dtype), w.t(), scale_a=one, scale_b=one, out_dtype=BF16)
                        for x, (w, _) in zip(xs, weights)
                    ]
                    if rows > 1
                    else []
                )
                yield OpCase(
                    "fp8_product",
                    self.shape.name,
                    f"{matrix} {num_out}×{num_in}, {rows} rows",
                    calls,
                    num_out * num_in + 2.0 * rows * (num_in + num_out),
                    2.0 * rows * num_out * num_in,
                    {"_scaled_mm": plain} if plain else {},
                    is_fp8=True,
                )

    def int_product(self) -> Iterator[OpCase]:
        """The head has 8 bits with either kind."""
        for bits in (8, 4):
            for matrix, (num_out, num_in) in self.shape.matrices().items():
                if bits == 8 or matrix != "head":
                    yield from self._int_products(bits, matrix, num_out, num_in)

    def _int_products(self, bits: int, matrix: str, num_out: int, num_in: int) -> Iterator[OpCase]:
        size = num_out * num_in * (bits / 8 + (2 if bits == 8 else 4) / GROUP)
        weights = [self._integers(bits, num_out, num_in) for _ in range(self._num_sets(size))]
        for rows in self._rows_of(matrix, self.sizes.product_rows):
            num = min(len(weights), self._num_sets(size + 2 * rows * num_in))
            added = self._added(matrix, rows, num_out)
            norm = torch.ones(num_in, device=self.device) if matrix in NORMED else None  # is not folded into these
            calls = [
                partial(
                    ops.int_product, self._normal(rows, num_in), words, scales, num_out, *_around(matrix, added, norm)
                )
                for words, scales in weights[:num]
            ]
            name = f"{bits} bits, {matrix} {num_out}×{num_in}, {rows} rows"
            yield OpCase(
                "int_product",
                self.shape.name,
                name,
                calls,
                size + 2.0 * rows * (num_in + num_out),
                2.0 * rows * num_out * num_in,
            )

    def _integers(self, bits: int, num_out: int, num_in: int) -> tuple[Tensor, Tensor]:
        """Words and scales of random codes, whose values are about num_in^-0.5 in size."""
        words, scales = empty_ints(bits, num_out, num_in, self.device)
        words.random_(-(2**31), 2**31)
        scales.fill_(num_in**-0.5 / (80 if bits == 8 else 5))
        if bits == 4:
            scales[..., 1] *= -7.5
        return words, scales

    def _added(self, matrix: str, rows: int, num_out: int) -> Tensor | None:
        return self._normal(rows, num_out) if matrix in ("out", "down") else None


def _around(matrix: str, residual: Tensor | None, norm: Tensor | None = None) -> tuple[Epilogue, Tensor | None, float]:
    """Return epilogue, norm and eps as a layer gives them."""
    gated = matrix == "gate_up"
    return Epilogue(None, "silu" if gated else None, gated, residual), norm, EPS if matrix in NORMED else 0.0
