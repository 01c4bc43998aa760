"""A matrix product, whatever the weight's storage."""

from __future__ import annotations

from torch import Tensor

from penstock.quant.scheme import Scheme


class Linear:
    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def __call__(self, x: Tensor, residual: Tensor | None = None, activation: str | None = None) -> Tensor:
        return self.scheme.matmul(x, residual, activation)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        return self.scheme.gated(x, activation)

    @property
    def num_bytes(self) -> int:
        return self.scheme.num_bytes
