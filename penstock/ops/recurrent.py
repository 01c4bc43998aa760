"""Ops of recurrent mixers. Each sequence's state is float32 and updated in place, token after token."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.ops.registry import op


@op(tolerance={torch.float32: 1e-5}, rowwise=True)
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, query_start: Tensor) -> Tensor:
    """Convolve each channel of x[T, C] with weight[C, K] within its sequence → [T, C].

    tail[S, K - 1, C] holds the inputs before the step's first token, then those before the next step's."""
    y, size = torch.empty_like(x), weight.shape[1]
    for state, (begin, end) in zip(tail, pairwise(query_start.tolist())):
        inputs = torch.cat([state, x[begin:end].float()])
        total = torch.zeros_like(inputs[size - 1 :]) if bias is None else bias.expand_as(inputs[size - 1 :])
        for k in range(size):
            total = total + inputs[k : k + end - begin] * weight[:, k]
        y[begin:end] = total
        state.copy_(inputs[end - begin :])
    return y


@op(tolerance={torch.float32: 1e-5}, rowwise=True)
def state_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, query_start: Tensor
) -> Tensor:
    """Run a selective state space model over x[T, H, P] → [T, H, P]. With Δ = softplus(dt[T, H]), each head's state
    [P, N] decays by exp(Δ · a[H]) and gains Δ · x · bᵀ; the output is state · c + d[H] · x.

    b and c are [T, G, N], for H / G heads each; state[S, H, P, N] is that before and then after the step's tokens."""
    y, repeat = torch.empty_like(x), x.shape[1] // b.shape[1]
    for current, (begin, end) in zip(state, pairwise(query_start.tolist())):
        for t in range(begin, end):  # one by one: torch's exp depends on where in a call a value lies
            value, delta = x[t].float(), F.softplus(dt[t].float())[:, None]
            gain, read = (each[t].float().repeat_interleave(repeat, dim=0)[:, None] for each in (b, c))
            current.copy_(current * torch.exp(delta * a[:, None])[:, None] + (delta * value)[:, :, None] * gain)
            y[t] = (current * read).sum(dim=2) + d[:, None] * value
    return y
