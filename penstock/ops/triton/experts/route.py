from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.experts.route import RouterRule, route
from penstock.ops.triton.launch import pdl_options, wait_for_previous
from penstock.ops.triton.numbers import sigmoid
from penstock.ops.triton.sizes import power_of_2

MIN_CHOICE = tl.constexpr(-3.0e38)  # of an expert that may be chosen: it is over that of one that may not, even for NaN


@triton.jit
def _find_best(values):
    """Return the place of the largest of values[N], the first of equal ones."""
    return tl.argmax(values, 0, tie_break_left=True)


@triton.jit
def _keep_groups(
    choices, e, NUM: tl.constexpr, SIZE: tl.constexpr, TOP: tl.constexpr, BEST: tl.constexpr, GROUPS: tl.constexpr
):
    """Set choices[E] outside the TOP best of NUM groups of SIZE to -inf. A group's score is the sum of BEST of it."""
    group = tl.arange(0, GROUPS)
    members = (group[:, None] == (e // SIZE)[None, :]) & (group < NUM)[:, None]
    left = tl.where(members, choices[None, :], float("-inf"))
    scores = tl.zeros((GROUPS,), tl.float32)
    for _ in tl.static_range(BEST):
        place = tl.argmax(left, 1, tie_break_left=True)
        scores += tl.max(left, 1)
        left = tl.where(e[None, :] == place[:, None], float("-inf"), left)
    scores = tl.where(group < NUM, tl.maximum(scores, MIN_CHOICE), float("-inf"))
    kept = choices
    allowed = e < 0
    for _ in tl.static_range(TOP):
        best = _find_best(scores)
        allowed = allowed | (e // SIZE == best)
        scores = tl.where(group == best, float("-inf"), scores)
    return tl.where(allowed, kept, float("-inf"))


@triton.jit
def _choose(
    logits, choices, e, inside, NUM: tl.constexpr, K: tl.constexpr, SPARSE: tl.constexpr, DISTANCE: tl.constexpr
):
    """Return the experts of the NUM largest choices[E], ids[K], and SPARSE their weights[K]."""
    k = tl.arange(0, K)
    ids, weights = tl.full((K,), 2147483647, tl.int32), tl.zeros((K,), tl.float32)
    left = tl.where(inside, logits, float("-inf"))
    for i in tl.static_range(NUM):
        best = _find_best(choices)
        ids = tl.where(k == i, best, ids)
        if SPARSE:
            most = tl.max(tl.where(e == best, logits, float("-inf")), 0)
            near = inside & (((most - logits) / tl.maximum(tl.abs(logits), most) > DISTANCE) == 0)
            weight = 1.0 / tl.sum(tl.where(near, tl.exp(left - most), 0.0), 0)
            weights = tl.where(k == i, weight, weights)
            left = tl.where(e == best, float("-inf"), left)
        choices = tl.where(e == best, float("-inf"), choices)
    return ids, weights


@triton.jit
def _route(
    logits,
    bias,
    ids_out,
    weights_out,
    row_stride,
    num_experts,
    factor,
    DISTANCE: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZES: tl.constexpr,
    NUM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Route one row; its experts are stored in ascending order. Damaged logits still choose different experts."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, BLOCK), tl.arange(0, K)
    inside = e < num_experts
    x = tl.load(logits + row * row_stride + e, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORE == "sigmoid":
        scores = sigmoid(x)
    else:
        exponents = tl.exp(x - tl.max(x, 0))
        scores = exponents / tl.sum(exponents, 0)
    choices = x
    if bias is not None or BEST > 1:
        choices = scores
    if bias is not None:
        choices += tl.load(bias + e, mask=inside, other=0.0)
    choices = tl.where(inside, tl.where(choices > MIN_CHOICE, choices, MIN_CHOICE), float("-inf"))
    if NUM_GROUPS > 1:
        choices = _keep_groups(choices, e, NUM_GROUPS, SIZE, TOP_GROUPS, BEST, GROUPS)
    ids, weights = _choose(x, choices, e, inside, NUM, K, SCORE == "sparsemixer", DISTANCE)
    if SCORE != "sparsemixer":
        chosen = ids[:, None] == e[None, :]
        if SCORE == "softmax" and NORMALIZES:
            own = tl.sum(tl.where(chosen, x[None, :], 0.0), 1)
            own = tl.where(k < NUM, own, float("-inf"))
            weights = tl.exp(own - tl.max(own, 0))
            weights = weights / tl.sum(weights, 0)
        else:
            weights = tl.sum(tl.where(chosen, scores[None, :], 0.0), 1)
            if NORMALIZES:
                weights = weights / (tl.sum(weights, 0) + 1e-20)
    rank = tl.sum((ids[None, :] < ids[:, None]).to(tl.int32), 1)
    place = row * NUM + rank
    tl.store(ids_out + place, ids, mask=k < NUM)
    tl.store(weights_out + place, weights * factor, mask=k < NUM)


@route.impl("cuda", exact=True)
def _body(logits: Tensor, bias: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
    num_rows, num_experts = logits.shape
    rule.check(num_experts)
    ids = torch.empty((num_rows, rule.num_chosen), dtype=torch.int32, device=logits.device)
    weights = torch.empty(ids.shape, device=logits.device)
    if num_rows:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        _route[(num_rows,)](
            logits,
            bias,
            ids,
            weights,
            logits.stride(0),
            num_experts,
            rule.scale,
            2 * rule.jitter,
            rule.score,
            rule.normalizes,
            rule.num_chosen,
            rule.num_groups,
            rule.top_groups,
            rule.best_of_group,
            num_experts // rule.num_groups,
            power_of_2(rule.num_groups),
            power_of_2(rule.num_chosen),
            power_of_2(num_experts),
            num_warps=1 if num_experts <= 256 else 4,
            **pdl_options(logits),
        )
    return ids, weights
