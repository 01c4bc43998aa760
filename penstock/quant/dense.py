"""Full-precision storage: float32, bfloat16 or float16 in panels of 16 outputs."""

from __future__ import annotations

from torch import Tensor

from penstock import ops
from penstock.quant.scheme import RmsNorm


class Dense:
    """A weight [O, C] as panels, its bias [O] in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.num_out, self.num_in = weight.shape
        self.panels = ops.pack_panels(weight)
        self.bias = None if bias is None else bias.float().contiguous()

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def matmul(
        self, x: Tensor, residual: Tensor | None = None, activation: str | None = None, norm: RmsNorm | None = None
    ) -> Tensor:
        x = x if norm is None else norm(x)
        return ops.linear(x, self.panels, self.num_out, self.bias, residual, activation)

    def gated(self, x: Tensor, activation: str, norm: RmsNorm | None = None) -> Tensor:
        x = x if norm is None else norm(x)
        if self.num_out % (2 * ops.PANEL):  # a panel would hold gates and values
            return ops.gated_activation(self.matmul(x), activation)
        return ops.linear(x, self.panels, self.num_out, self.bias, None, activation, True)

    def rows(self, ids: Tensor) -> Tensor:
        return ops.embedding(ids, self.panels, self.num_in)
