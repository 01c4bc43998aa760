from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.cpu.runtime.library import Kernel, as_rows, check_float32, pointer
from penstock.ops.experts.combine import combine, weigh
from penstock.ops.experts.route import SCORES, RouterRule, route

_route_kernel = Kernel("route", "pnnnpniifnnnfpp")
_weigh_kernel = Kernel("weigh", "pnnnnpp")
_combine_kernel = Kernel("combine", "pnnnppnppnp")


@route.impl("cpu", exact=True)
def _route(logits: Tensor, bias: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
    logits = as_rows("logits", logits)
    num_rows, num_experts = logits.shape
    rule.check(num_experts)
    if bias is not None:
        bias = check_float32("bias", bias).contiguous()
        if bias.shape != (num_experts,):
            raise ValueError(f"the selection bias has the shape {tuple(bias.shape)}, not ({num_experts},)")
    ids = torch.empty(num_rows, rule.num_chosen, dtype=torch.int32)
    weights = torch.empty(num_rows, rule.num_chosen)
    _route_kernel(
        logits.data_ptr(), logits.stride(0), num_rows, num_experts, pointer(bias), rule.num_chosen,
        SCORES.index(rule.score), rule.normalizes, rule.scale, rule.num_groups, rule.top_groups, rule.best_of_group,
        rule.jitter, ids.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    return ids, weights


def _check_weights(weights: Tensor, shape: tuple[int, ...]) -> Tensor:
    if weights.shape != shape:
        raise ValueError(f"weights {tuple(weights.shape)} are not of the shape {shape}")
    return check_float32("weights", weights).contiguous()


@weigh.impl("cpu", exact=True)
def _weigh(x: Tensor, weights: Tensor) -> Tensor:
    x = as_rows("x", x)
    num_rows, width = x.shape
    weights = _check_weights(weights, (num_rows, weights.shape[1]))
    out = torch.empty(num_rows, weights.shape[1], width)
    _weigh_kernel(x.data_ptr(), x.stride(0), num_rows, weights.shape[1], width, weights.data_ptr(), out.data_ptr())
    return out


@combine.impl("cpu", exact=True)
def _combine(
    y: Tensor,
    weights: Tensor | None,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    y = check_float32("y", y).contiguous()
    num_rows, num_chosen, width = y.shape
    out = torch.empty(num_rows, width)
    weights = None if weights is None else _check_weights(weights, (num_rows, num_chosen))
    added = [None if each is None else as_rows("an addend", each) for each in (shared, residual)]
    for each in added:
        if each is not None and each.shape != out.shape:
            raise ValueError(f"an addend has the shape {tuple(each.shape)}, not {tuple(out.shape)}")
    if gate is not None:
        gate = check_float32("gate", gate).contiguous()
        if gate.shape != (num_rows, 1):
            raise ValueError(f"gate has the shape {tuple(gate.shape)}, not ({num_rows}, 1)")
    first, second = ((pointer(each), 0 if each is None else each.stride(0)) for each in added)
    _combine_kernel(
        y.data_ptr(), num_rows, num_chosen, width, pointer(weights), *first, pointer(gate), *second, out.data_ptr()
    )
    return out
