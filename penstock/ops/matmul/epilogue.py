"""The epilogue of a matrix product: bias, activation, gate and residual as one value."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from penstock.ops.elementwise import find_activation, gate_by


class Epilogue(NamedTuple):
    """residual + act(y + bias); gated, the outputs are [gate, up] and become residual + act(gate) · up."""

    bias: Tensor | None = None  # [O]
    activation: str | None = None
    gated: bool = False
    residual: Tensor | None = None  # [T, O], gated [T, O/2]; the result may be written into it

    def num_results(self, num_out: int) -> int:
        """Return how many values a row of `num_out` outputs becomes."""
        return num_out // 2 if self.gated else num_out


NO_EPILOGUE = Epilogue()


def apply_epilogue(y: Tensor, epilogue: Epilogue) -> Tensor:
    """Apply the epilogue to sums y[T, O] in plain PyTorch: the reference of every body's own."""
    y = y if epilogue.bias is None else y + epilogue.bias
    if epilogue.gated:
        gate, up = y.chunk(2, dim=-1)
        y = gate * up if epilogue.activation is None else gate_by(epilogue.activation, gate, up)
    elif epilogue.activation is not None:
        y = find_activation(epilogue.activation)(y)
    return y if epilogue.residual is None else epilogue.residual + y
