"""Round or prune a matrix column by column, each column's error spread over those not yet done (GPTQ, SparseGPT)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.quantize.grids import Grid

COLUMNS = 128  # done before the rest of the matrix hears of their errors
DAMPING = 0.1  # of the mean square, added to every input's: calibration texts are short


class Factor:
    """The upper Cholesky factor of the inverse of Σ x xᵀ, of inputs in some order."""

    def __init__(self, products: Tensor, by_size: bool) -> None:
        hessian = products.double()
        diagonal = hessian.diagonal()
        self.is_dead = diagonal <= 0
        mean = float(diagonal.mean()) or 1.0
        self.order = torch.argsort(diagonal, descending=True) if by_size else torch.arange(len(diagonal))
        hessian = hessian[self.order][:, self.order]
        self.upper = self._invert(hessian, mean).float()

    @staticmethod
    def _invert(hessian: Tensor, mean: float) -> Tensor:
        """Damp until the factor exists: few tokens leave many directions without any input."""
        for damping in (DAMPING, 0.3, 1.0, 10.0):
            damped = hessian + torch.eye(len(hessian), dtype=hessian.dtype) * (damping * mean)
            lower, failed = torch.linalg.cholesky_ex(damped)
            if failed == 0:
                upper: Tensor
                upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
                if failed == 0 and bool(upper.isfinite().all()):
                    return upper
        raise PenstockError("the inputs of a matrix are not finite numbers: the model's weights are damaged")


Choose = Callable[[Tensor, Tensor], Tensor]  # w[O, n], d[n] of the factor's diagonal → True where pruned [O, n]


@dataclass
class Sweep:
    """A way to round and prune, column by column."""

    fit: Callable[[Tensor], Grid] | None = None  # w[O, group] → its grid; None: values stay as they are
    group: int = 0  # inputs of a grid; 0: all
    mask: Tensor | None = None  # [O, C]: True where a value is 0, chosen before
    choose: Choose | None = None  # choose so on the way, `every` columns at a time
    every: int = COLUMNS

    def run(self, weight: Tensor, factor: Factor) -> tuple[Tensor, Grid | None]:
        """Return the matrix as rounded, and the grid its values lie on."""
        order, upper = factor.order, factor.upper
        in_order = bool((order == torch.arange(len(order))).all())
        w = weight.float().clone()
        w[:, factor.is_dead] = 0
        width = w.shape[1]
        group = self.group or width
        grids: list[Grid | None] = [None] * (width // group)
        if self.fit is not None and (not in_order or COLUMNS % group):
            grids = [self.fit(w[:, g * group : (g + 1) * group]) for g in range(len(grids))]
        columns = w.t()[order].contiguous()  # [C, O]: a column is one run of memory
        mask = None if self.mask is None else self.mask.t()[order]
        for first in range(0, width, COLUMNS):
            last = min(first + COLUMNS, width)
            part, errors = columns[first:last], torch.zeros(last - first, len(w))
            cut = torch.zeros_like(part, dtype=torch.bool) if mask is None else mask[first:last].clone()
            block = upper[first:last, first:last].contiguous()
            for j in range(last - first):
                if self.choose is not None and j % self.every == 0:
                    chosen = self.choose(part[j : j + self.every].t(), block.diagonal()[j : j + self.every])
                    cut[j : j + self.every] = chosen.t()
                value = part[j].masked_fill(cut[j], 0.0)
                if self.fit is not None:
                    at = int(order[first + j]) // group
                    grid = grids[at]
                    if grid is None:
                        kept = part[j : j + group].masked_fill(cut[j : j + group], 0.0)
                        grid = grids[at] = self.fit(kept.t())
                    value = grid.round(value[:, None])[:, 0]
                errors[j] = (part[j] - value) / block[j, j]
                part[j + 1 :].addr_(block[j, j + 1 :], errors[j], alpha=-1.0)
                part[j] = value
            if last < width:
                columns[last:].addmm_(upper[first:last, last:].t(), errors, alpha=-1.0)
        result = torch.empty_like(w)
        result[:, order] = columns.t()
        return result, _join([grid for grid in grids if grid is not None])


def _join(grids: list[Grid]) -> Grid | None:
    if not grids:
        return None
    zeros = [grid.zero for grid in grids if grid.zero is not None]
    scale = torch.cat([grid.scale for grid in grids], dim=1)
    return Grid(grids[0].bits, scale, torch.cat(zeros, dim=1) if zeros else None, grids[0].is_float)
