"""The end of a matrix product, as its kernels take it: bias, activation, gate, residual and where the result goes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.ops.activation import KINDS
from penstock.ops.cpu.library import float32, rows

_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_PANEL = 16


@dataclass(frozen=True)
class End:
    """What becomes of the sums of outputs that are computed together or part by part."""

    out: Tensor
    bias: Tensor | None
    residual: Tensor | None
    activation: int
    gated: bool

    def arguments(self, first: int, num_out: int) -> tuple[int | None, ...]:
        """The kernel's arguments from num_out on, for the weight's outputs [first, first + num_out)."""
        return (
            num_out // 2 if self.gated else num_out,
            _address(self.bias, first),
            _address(self.residual, first),
            0 if self.residual is None else self.residual.stride(0),
            self.activation,
            self.gated,
            _address(self.out, first),
            self.out.stride(0),
        )


def _address(x: Tensor | None, column: int) -> int | None:
    return None if x is None else x.data_ptr() + column * x.element_size()


def finish(
    x: Tensor, num_out: int, bias: Tensor | None, residual: Tensor | None, activation: str | None, gated: bool
) -> End:
    """Checked, with room for the result; `num_out` is the weight's."""
    if activation is not None and activation not in _NUMBERS:
        raise ValueError(f"activation kind={activation!r} is not known: use one of {', '.join(KINDS)}")
    if bias is not None:
        bias = float32("bias", bias).contiguous()
        if bias.shape != (num_out,):
            raise ValueError(f"bias has the shape {tuple(bias.shape)}, not ({num_out},)")
    if gated:
        if num_out % (2 * _PANEL):
            raise ValueError(f"{num_out} outputs do not divide into gates and values of whole panels of {_PANEL}")
        num_out //= 2
    out = x.new_empty(x.shape[0], num_out)
    if residual is not None:
        residual = rows("residual", residual)
        if residual.shape != out.shape:
            raise ValueError(f"residual has the shape {tuple(residual.shape)}, not {tuple(out.shape)}")
    return End(out, bias, residual, -1 if activation is None else _NUMBERS[activation], gated)
