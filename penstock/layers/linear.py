"""A matrix product, whatever the weight's storage."""

from __future__ import annotations

from torch import Tensor

from penstock.quant.scheme import Scheme


class Linear:
    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def __call__(self, x: Tensor, residual: Tensor | None = None, activation: str | None = None,
                 gated: bool = False) -> Tensor:
        return self.scheme.matmul(x, residual, activation, gated)

    @property
    def num_bytes(self) -> int:
        return self.scheme.num_bytes
