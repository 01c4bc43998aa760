"""Note the inputs of linears, for calibration."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from penstock.models.decoder import Decoder, Encoder, linears
from penstock.quant.scheme import Scheme

Note = Callable[[str, Tensor], None]  # a linear's name, and x[T, C] that it is given


class ObservedScheme:
    """Multiply as `scheme` does, after telling `note` of x."""

    def __init__(self, name: str, scheme: Scheme, note: Note) -> None:
        self.name, self.scheme, self.note = name, scheme, note
        self.num_out, self.num_in = scheme.num_out, scheme.num_in

    @property
    def num_bytes(self) -> int:
        return self.scheme.num_bytes

    def matmul(self, x: Tensor) -> Tensor:
        self.note(self.name, x)
        return self.scheme.matmul(x)

    def rows(self, ids: Tensor) -> Tensor:
        return self.scheme.rows(ids)


def observe(model: Decoder | Encoder, note: Note) -> None:
    """Call `note` with every input of every linear of the stack, from now on. The model must be plain."""
    for name, linear, _ in linears(model):
        linear.scheme = ObservedScheme(name, linear.scheme, note)
