"""Mixers whose memory is one state per sequence, whatever its length."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.layers.linear import Linear
from penstock.layers.memory import StateRows
from penstock.layers.norm import Norm
from penstock.layers.step import StepInputs
from penstock.ops import OpTable


class CausalConv:
    """act(conv(x)), each channel by itself over the last K tokens."""

    def __init__(self, ops: OpTable, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        self.ops, self.weight, self.bias, self.activation = ops, weight, bias, activation
        self.num_channels, self.tail = weight.shape[0], weight.shape[1] - 1

    def __call__(self, x: Tensor, tail: Tensor, step: StepInputs) -> Tensor:
        return self.ops.activation(
            self.ops.causal_conv(x, self.weight, self.bias, tail, step.query_start), self.activation
        )


class StateSpace:
    """Mamba-2's selective state space: heads share b and c in groups."""

    def __init__(self, ops: OpTable, a: Tensor, d: Tensor, dt_bias: Tensor, shape: tuple[int, int, int]) -> None:
        self.ops, self.a, self.d, self.dt_bias, self.num_heads = ops, a, d, dt_bias, a.shape[0]
        self.head_size, self.num_groups, self.state_size = shape

    def __call__(self, xbc: Tensor, dt: Tensor, state: Tensor, step: StepInputs) -> Tensor:
        width, shared = self.num_heads * self.head_size, self.num_groups * self.state_size
        x, b, c = torch.split(xbc, [width, shared, shared], dim=1)
        b, c = (each.view(len(x), self.num_groups, self.state_size) for each in (b, c))
        x, dt = x.view(len(x), self.num_heads, self.head_size), self.ops.add(dt, self.dt_bias)
        return self.ops.state_scan(x, dt, self.a, b, c, self.d, state, step.query_start).flatten(1)


class Mamba2:
    """out(norm(silu(gate) · space(conv(xbc)))), with gate, xbc and dt = project(x)."""

    def __init__(
        self, ops: OpTable, project: Linear, conv: CausalConv, space: StateSpace, norm: Norm, out: Linear
    ) -> None:
        self.ops, self.project, self.conv, self.space, self.norm, self.out = ops, project, conv, space, norm, out

    def __call__(self, x: Tensor, step: StepInputs, memory: StateRows) -> Tensor:
        conv, space, table = self.conv, self.space, step.tables[memory.group]
        sizes = [self.norm.size, conv.num_channels, space.num_heads]
        gate, xbc, dt = torch.split(self.project(x, step), sizes, dim=1)
        kept = memory.read(table, step.lengths == step.query_start.diff())
        state = kept[:, : space.num_heads].view(len(kept), space.num_heads, space.head_size, space.state_size)
        rest = kept[:, space.num_heads :].view(len(kept), -1)
        tail = rest[:, : conv.tail * conv.num_channels].view(len(kept), conv.tail, conv.num_channels)
        y = space(conv(xbc, tail, step), dt, state, step)
        memory.write(table, kept)
        y = self.ops.gated_activation(torch.cat([gate, y], dim=1), "silu")
        return self.out(self.norm(y), step)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield from (("in", self.project), ("out", self.out))
