"""A matrix product, whatever the weight's storage."""

from __future__ import annotations

from torch import Tensor

from penstock.layers.norm import Norm, RmsNorm
from penstock.quant.matrix import Matrix
from penstock.quant.scheme import Scheme


def ready(x: Tensor, norm: Norm | None) -> tuple[Tensor, RmsNorm | None]:
    """x normed by what no product can do itself, and the norm that is left."""
    return (x, norm) if norm is None or isinstance(norm, RmsNorm) else (norm(x), None)


class Linear:
    """`norm` is applied to x first."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, activation: str | None = None, norm: Norm | None = None
    ) -> Tensor:
        x, norm = ready(x, norm)
        return self.scheme.matmul(x, residual, activation, norm)

    def unnormed(self, x: Tensor, norm: RmsNorm) -> tuple[Tensor, float] | None:
        """Where the scheme can leave its norm to whoever reads the product: that, and the norm's eps."""
        return self.scheme.unnormed(x, norm) if isinstance(self.scheme, Matrix) else None

    def gated(self, x: Tensor, activation: str, norm: Norm | None = None) -> Tensor:
        x, norm = ready(x, norm)
        return self.scheme.gated(x, activation, norm)

    @property
    def num_bytes(self) -> int:
        return self.scheme.num_bytes
