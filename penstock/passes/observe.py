"""Note the inputs of linears and of experts, for calibration."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from penstock import layers
from penstock.models.decoder import Decoder, Encoder, linears
from penstock.quant.scheme import Scheme, StackScheme

Note = Callable[[str, Tensor], None]  # a matrix's name, and x[T, C] that it is given


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


class ObservedExperts(ObservedScheme):
    """Multiply a stack as `scheme` does, after telling `note` of each matrix's rows, under its number."""

    scheme: StackScheme

    def grouped_matmul(self, x: Tensor, ids: Tensor, num_matrices: int) -> Tensor:
        for number in sorted(set(ids.flatten().tolist())):
            chosen = ids == number  # [T, K]
            self.note(f"{self.name}.{number}", x[chosen.any(1)] if x.ndim == 2 else x[chosen])
        return self.scheme.grouped_matmul(x, ids, num_matrices)


def observe(model: Decoder | Encoder, note: Note) -> None:
    """Call `note` with every input of every linear and expert of the stack, from now on. The model must be plain."""
    for name, linear, _ in linears(model):
        linear.scheme = ObservedScheme(name, linear.scheme, note)
    for index, (described, block) in enumerate(zip(model.spec.layers, model.blocks)):
        if isinstance(block.ffn, layers.Experts) and described.ffn is not None:
            for name, stack in zip(("gate_up", "down"), block.ffn.stacks()):
                name = f"layers.{index}.{described.ffn.prefix}.experts.{name}"
                stack.scheme = ObservedExperts(name, stack.scheme, note)
