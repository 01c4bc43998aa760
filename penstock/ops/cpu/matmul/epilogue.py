"""The epilogue of a matrix product as the kernels take it: bias, activation, gate, residual and the result's memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.ops.cpu.elementwise import activation_number
from penstock.ops.cpu.runtime.library import as_rows, check_float32
from penstock.ops.matmul.epilogue import Epilogue

_PANEL = 16


@dataclass(frozen=True)
class EpilogueArguments:
    """The arguments as `check_epilogue` returns them, for outputs that are computed together or part by part."""

    out: Tensor
    bias: Tensor | None
    residual: Tensor | None
    activation: int
    gated: bool

    def arguments(self, first: int, num_out: int) -> tuple[int | None, ...]:
        """Give the kernel's arguments from num_out on, for the weight's outputs [first, first + num_out)."""
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


def check_epilogue(x: Tensor, num_out: int, epilogue: Epilogue) -> EpilogueArguments:
    """Check the arguments and allocate the result; `num_out` counts the weight's outputs, gate and up alike."""
    bias, activation, gated, residual = epilogue
    number = -1 if activation is None else activation_number(activation, gated)
    if bias is not None:
        bias = check_float32("bias", bias).contiguous()
        if bias.shape != (num_out,):
            raise ValueError(f"bias has the shape {tuple(bias.shape)}, not ({num_out},)")
    if gated:
        if num_out % (2 * _PANEL):
            raise ValueError(f"{num_out} outputs do not divide into gates and values of whole panels of {_PANEL}")
        num_out //= 2
    out = x.new_empty(x.shape[0], num_out)
    if residual is not None:
        residual = as_rows("residual", residual)
        if residual.shape != out.shape:
            raise ValueError(f"residual has the shape {tuple(residual.shape)}, not {tuple(out.shape)}")
    return EpilogueArguments(out, bias, residual, number, gated)
