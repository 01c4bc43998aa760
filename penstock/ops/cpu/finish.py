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
    out: Tensor
    arguments: tuple[int | None, ...]
    kept: tuple[Tensor | None, ...]     # tensors the arguments point into


def finish(x: Tensor, num_out: int, bias: Tensor | None, residual: Tensor | None, activation: str | None,
           gated: bool) -> End:
    """The kernel's arguments from num_out on; `num_out` here is the weight's."""
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
    arguments = (num_out, None if bias is None else bias.data_ptr(),
                 None if residual is None else residual.data_ptr(), 0 if residual is None else residual.stride(0),
                 -1 if activation is None else _NUMBERS[activation], int(gated), out.data_ptr(), out.stride(0))
    return End(out, arguments, (bias, residual))
