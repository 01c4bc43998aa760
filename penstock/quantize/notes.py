"""Keep of a linear's inputs what rounding its weight needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.quant.scheme import StackScheme

SAMPLE_ROWS = 256


@dataclass
class Note:
    """Sums over the inputs x[T, C] of a linear."""

    width: int
    wants_products: bool = True
    count: int = 0
    squares: Tensor = field(init=False)  # [C]: Σ x²
    magnitudes: Tensor = field(init=False)  # [C]: Σ |x|
    largest: Tensor = field(init=False)  # [C]
    products: Tensor | None = field(init=False, default=None)  # [C, C]: Σ x xᵀ / ‖x‖², so that tokens count alike
    samples: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.squares, self.magnitudes, self.largest = (torch.zeros(self.width) for _ in range(3))
        if self.wants_products:
            self.products = torch.zeros(self.width, self.width)

    def add(self, x: Tensor) -> None:
        x = x.reshape(-1, self.width).float()
        self.count += len(x)
        self.squares += x.square().sum(0)
        self.magnitudes += x.abs().sum(0)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        if self.products is not None:
            unit = x / x.norm(dim=1, keepdim=True).clamp(min=1e-12)
            self.products.addmm_(unit.t(), unit)
        self.samples.append(x[:: max(1, len(x) // 64)].clone())

    @property
    def importance(self) -> Tensor:
        """Mean square of each input [C]."""
        return self.squares / max(1, self.count)

    @property
    def sample(self) -> Tensor:
        """Some inputs [S, C]."""
        rows = torch.cat(self.samples)
        return rows[:: max(1, len(rows) // SAMPLE_ROWS)][:SAMPLE_ROWS]

    def divide(self, scale: Tensor) -> None:
        """Account for inputs divided by scale[C]."""
        self.squares /= scale.square()
        self.magnitudes /= scale
        self.largest /= scale
        if self.products is not None:
            self.products /= scale[:, None]
            self.products /= scale
        self.samples = [rows / scale for rows in self.samples]

    def error(self, weight: Tensor, rounded: Tensor) -> float:
        """Relative error of the outputs of `rounded`, by the sample: ‖x(w − r)ᵀ‖ / ‖xwᵀ‖."""
        x = self.sample
        scale = (x @ weight.t()).square().sum()
        return float(((x @ (weight - rounded).t()).square().sum() / scale.clamp(min=1e-30)).sqrt())


class ObservedStack:
    """Multiply as a stack of matrices does, after noting what each of them is given."""

    def __init__(self, scheme: StackScheme, notes: Sequence[Note]) -> None:
        self.scheme, self.notes = scheme, notes
        self.num_out, self.num_in = scheme.num_out, scheme.num_in

    @property
    def num_bytes(self) -> int:
        return self.scheme.num_bytes

    def matmul(self, x: Tensor) -> Tensor:
        return self.scheme.matmul(x)

    def grouped_matmul(self, x: Tensor, ids: Tensor, num_matrices: int) -> Tensor:
        rows = x if x.ndim == 3 else x[:, None].expand(-1, ids.shape[1], -1)
        for index in sorted(set(ids.flatten().tolist())):
            self.notes[index].add(rows[ids == index])
        return self.scheme.grouped_matmul(x, ids, num_matrices)

    def rows(self, ids: Tensor) -> Tensor:
        return self.scheme.rows(ids)
