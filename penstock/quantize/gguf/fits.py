"""Search scales for groups of values: the integers that lie closest, by weighted squared error.

All functions take x[N, G] and weights w[N, G] ≥ 0 of as many errors. Each tries a range of scales around the one that
spans the group; for the codes that a scale gives, the best scale (and minimum) is a small least-squares problem.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TINY = 1e-30  # what is smaller counts as zero


def divide(x: Tensor, by: Tensor) -> Tensor:
    """x / by, zero where `by` is zero."""
    return torch.where(by.abs() > TINY, x / torch.where(by.abs() > TINY, by, 1.0), 0.0)


@dataclass(frozen=True)
class Range:
    """Numbers of steps to try across a group's span: top + first, top + first + step, …, `count` of them."""

    first: float
    step: float
    count: int

    def steps(self, top: int) -> list[float]:
        return [top + self.first + self.step * i for i in range(self.count)]


AFFINE = Range(-1.0, 0.1, 21)
REFINEMENTS = 2


def _best_affine(x: Tensor, w: Tensor, codes: Tensor, totals: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Solve for scale and minimum ≤ 0 of given codes → (scale, minimum, error), each [N]."""
    w_sum, x_sum, square = totals
    weighted = w * codes
    q, qq, qx = weighted.sum(1), (weighted * codes).sum(1), (weighted * x).sum(1)
    determinant = w_sum * qq - q * q
    scale = divide(w_sum * qx - x_sum * q, determinant)
    minimum = divide(qq * x_sum - q * qx, determinant)
    alone = divide(qx, qq)
    has_minimum = (minimum < 0) & (determinant > TINY)
    scale, minimum = torch.where(has_minimum, scale, alone), torch.where(has_minimum, minimum, 0.0)
    error = square - 2 * scale * qx - 2 * minimum * x_sum
    error = error + scale * scale * qq + 2 * scale * minimum * q + minimum * minimum * w_sum
    return scale, minimum, torch.where(scale > 0, error, torch.inf)


def fit_affine(x: Tensor, w: Tensor, top: int, tried: Range = AFFINE) -> tuple[Tensor, Tensor]:
    """Fit x ≈ scale · q + minimum with q in 0 … top and minimum ≤ 0 → scale [N], minimum [N]."""
    low, high = x.amin(1).clamp(max=0), x.amax(1)
    span = (high - low).clamp(min=0)
    totals = w.sum(1), (w * x).sum(1), (w * x * x).sum(1)
    scale, minimum = span / top, low.clone()
    least = torch.full_like(scale, torch.inf)
    for steps in (float(top), *tried.steps(top)):
        codes = ((x - low[:, None]) * divide(torch.full_like(span, steps), span)[:, None]).round_().clamp_(0, top)
        scale, minimum, least = _keep((scale, minimum, least), _best_affine(x, w, codes, totals))
    for _ in range(REFINEMENTS):
        codes = divide(x - minimum[:, None], scale[:, None]).round_().clamp_(0, top)
        scale, minimum, least = _keep((scale, minimum, least), _best_affine(x, w, codes, totals))
    return scale, minimum


def _keep(best: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    is_better = found[2] < best[2]
    a, b, c = (torch.where(is_better, new, old) for new, old in zip(found, best))
    return a, b, c


SYMMETRIC = Range(-0.9, 0.1, 19)


def fit_symmetric(x: Tensor, w: Tensor, top: int, tried: Range = SYMMETRIC) -> Tensor:
    """Fit x ≈ scale · q with q in −top … top − 1 → scale [N], of either sign: the largest value may take −top."""
    extreme = x.gather(1, x.abs().argmax(1, keepdim=True))
    scale, best = torch.zeros_like(extreme[:, 0]), torch.zeros_like(extreme[:, 0])
    candidates = [-steps for steps in tried.steps(top)] + [steps - 1 for steps in tried.steps(top)]
    for steps in candidates:
        codes = (x * divide(torch.full_like(extreme, steps), extreme)).round_().clamp_(-top, top - 1)
        scale, best = _keep_symmetric(x, w, codes, scale, best)
    for _ in range(REFINEMENTS):
        codes = divide(x, scale[:, None]).round_().clamp_(-top, top - 1)
        scale, best = _keep_symmetric(x, w, codes, scale, best)
    return scale


def _keep_symmetric(x: Tensor, w: Tensor, codes: Tensor, scale: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the scale of `codes` where it takes away more of the error than `best`."""
    weighted = w * codes
    qx, qq = (weighted * x).sum(1), (weighted * codes).sum(1)
    gain = divide(qx * qx, qq)
    return torch.where(gain > best, divide(qx, qq), scale), torch.maximum(gain, best)


POSITIVE = Range(-1.0, 0.1, 21)


def fit_positive(x: Tensor, w: Tensor, top: int, tried: Range = POSITIVE) -> Tensor:
    """Fit x ≈ scale · q with x ≥ 0 and q in 0 … top → scale [N]."""
    most = x.amax(1, keepdim=True)
    scale, best = torch.zeros_like(most[:, 0]), torch.zeros_like(most[:, 0])
    for steps in (float(top), *tried.steps(top)):
        codes = (x * divide(torch.full_like(most, steps), most)).round_().clamp_(0, top)
        scale, best = _keep_symmetric(x, w, codes, scale, best)
    return scale
