"""The router of a mixture of experts: which few of many each row goes through, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.ops.elementwise import EXPONENTIAL
from penstock.ops.registry import op

Score = Literal["softmax", "sigmoid", "sparsemixer"]
SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "sparsemixer")


@dataclass(frozen=True)
class RouterRule:
    """Turns a row of router logits into `num_chosen` experts and their weights.

    A row's experts are those of the largest scores, plus the selection bias where there is one; of equal ones the
    lower id. With groups, only experts of the `top_groups` best groups are chosen from.
    """

    num_chosen: int
    score: Score = "softmax"
    normalizes: bool = False  # weights are divided by their sum
    scale: float = 1.0  # of all weights
    num_groups: int = 1  # of neighbouring experts, all of one size
    top_groups: int = 1
    best_of_group: int = 1  # a group's score is the sum of this many best of it
    jitter: float = 0.0  # sparsemixer: experts further than this below the best are left out

    def check(self, num_experts: int) -> None:
        """Raise a ValueError unless the rule can choose among `num_experts`."""
        size, left = divmod(num_experts, self.num_groups)
        if self.score not in SCORES or left or not 1 <= self.best_of_group <= size:
            raise ValueError(f"{self} does not divide {num_experts} experts")
        if not 1 <= self.top_groups <= self.num_groups or not 1 <= self.num_chosen <= self.top_groups * size:
            raise ValueError(f"{self} chooses more than there are of {num_experts} experts")


def choose(row: Tensor, count: int) -> Tensor:
    """Return the places of the `count` largest values of row[E], the first of equal ones first."""
    return torch.sort(row, descending=True, stable=True).indices[:count]


def _scores(logits: Tensor, rule: RouterRule) -> Tensor:
    return logits.sigmoid() if rule.score == "sigmoid" else logits.softmax(dim=0)


def _choices(logits: Tensor, bias: Tensor | None, rule: RouterRule) -> Tensor:
    """Return what experts are chosen by; logits themselves where nothing is added to scores, which rise with them."""
    choices = logits if bias is None and rule.best_of_group == 1 else _scores(logits, rule)
    if bias is not None:
        choices = choices + bias
    if rule.num_groups == 1:
        return choices
    groups = choices.view(rule.num_groups, -1)
    best = groups.sort(dim=1, descending=True).values[:, : rule.best_of_group].sum(dim=1)
    kept = torch.full_like(groups, float("-inf"))
    chosen = choose(best, rule.top_groups)
    kept[chosen] = groups[chosen]
    return kept.flatten()


def _mix_sparsely(logits: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
    left, ids, weights = logits.clone(), [], []
    for _ in range(rule.num_chosen):
        best = choose(left, 1)
        most = left[best]
        near = ~((most - logits) / torch.maximum(logits.abs(), most) > 2 * rule.jitter)  # 0 / 0 is no distance
        ids.append(best)
        weights.append(1 / torch.exp(left - most)[near].sum())
        left[best] = float("-inf")
    order = torch.cat(ids).argsort()
    return torch.cat(ids)[order], torch.stack(weights)[order]


def _route_row(logits: Tensor, bias: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
    if rule.score == "sparsemixer":
        ids, weights = _mix_sparsely(logits, rule)
    else:
        ids = choose(_choices(logits, bias, rule), rule.num_chosen).sort().values
        weights = _scores(logits, rule)[ids]
        if rule.score == "softmax" and rule.normalizes:
            weights = logits[ids].softmax(dim=0)
        elif rule.normalizes:
            weights = weights / (weights.sum() + 1e-20)
    return ids, weights * rule.scale


@op(tolerance=EXPONENTIAL, rowwise=True)
def route(logits: Tensor, bias: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
    """Return the experts of each row of logits[T, E], ids ascending [T, K] int32, and their weights [T, K] float32;
    bias[E] is added to the scores that experts are chosen by."""
    ids = torch.empty(len(logits), rule.num_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(ids.shape, device=logits.device)
    for i, row in enumerate(logits.float()):  # alone: torch's exp depends on where in a call a value lies
        ids[i], weights[i] = _route_row(row, bias, rule)
    return ids, weights
