"""Choose weights that become zero: by magnitude, with the inputs' norms (Wanda), or by the error left (SparseGPT)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.quantize.gptq import COLUMNS, Choose, Sweep
from penstock.quantize.notes import Note


def _smallest(score: Tensor, count: int) -> Tensor:
    """Mark the `count` smallest of each row of score[..., n]."""
    marked = torch.zeros_like(score, dtype=torch.bool)
    return marked.scatter_(-1, score.topk(count, dim=-1, largest=False).indices, True)


def _mark(score: Tensor, sparsity: str) -> Tensor:
    """Mark two of every four inputs, or a share of each output's."""
    rows, width = score.shape
    if sparsity == "2:4":
        return _smallest(score.view(rows, -1, 4), 2).view(rows, width)
    return _smallest(score, round(float(sparsity) * width))


def choose_zeros(weight: Tensor, note: Note | None, sparsity: str, by: str) -> Tensor:
    """Mark what `by` = "magnitude" or "wanda" makes zero in weight[O, C] → bool [O, C]."""
    score = weight.abs() * note.squares.sqrt() if by == "wanda" and note is not None else weight.abs()
    if by == "magnitude" and sparsity != "2:4":  # over the whole matrix, as usual for it
        return _smallest(score.reshape(1, -1), round(float(sparsity) * score.numel())).view_as(score)
    return _mark(score, sparsity)


def sparsegpt(sparsity: str) -> Sweep:
    """Make the sweep that chooses zeros by w² / d² where d is the factor's diagonal."""
    if sparsity == "2:4":
        return Sweep(choose=lambda w, d: _mark((w / d).square(), "2:4"), every=4)
    share = float(sparsity)

    def choose(w: Tensor, d: Tensor) -> Tensor:
        score = (w / d).square()
        return _smallest(score.reshape(1, -1), round(share * score.numel())).view_as(score)

    chosen: Choose = choose
    return Sweep(choose=chosen, every=COLUMNS)
