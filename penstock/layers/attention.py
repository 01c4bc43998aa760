"""Attention: causal over the paged cache, or bidirectional within a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.layers.linear import Linear
from penstock.layers.memory import KvCache
from penstock.layers.norm import Norm
from penstock.layers.rope import RopeTable
from penstock.layers.step import StepInputs
from penstock.ops import OpTable


class Mixer(Protocol):
    """Mixes the tokens of a sequence: attention, or a recurrence."""

    def __call__(self, x: Tensor, step: StepInputs, memory: Any) -> Tensor: ...

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Yield the matrices by their names."""


def apply_norm(norm: Norm | None, x: Tensor) -> Tensor:
    """Norm x[T, H, D] over heads, or over as many of them as the norm is wide."""
    if norm is None:
        return x
    num_tokens, num_heads, head_size = x.shape
    return norm(x.view(num_tokens, num_heads * head_size // norm.size, norm.size)).view(x.shape)


class Attention:
    sinks: tuple[Tensor, ...] = ()

    def __init__(
        self,
        ops: OpTable,
        qkv: Linear,
        out: Linear,
        heads: tuple[int, int, int],
        scale: float,
        rope: RopeTable | None = None,
        window: int = 0,
        softcap: float = 0.0,
        alibi: Tensor | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> None:
        self.ops, self.qkv, self.out = ops, qkv, out
        self.num_heads, self.num_kv_heads, self.head_size = heads  # query heads, KV heads, values of a head
        self.scale = scale
        self.rope, self.window, self.softcap, self.alibi = rope, window, softcap, alibi
        self.q_norm, self.k_norm = q_norm, k_norm

    def __call__(self, x: Tensor, step: StepInputs, memory: KvCache) -> Tensor:
        q = self.write(self.qkv(x, step), step, memory)
        return self.out(self.attend(q, step, memory), step)

    def write(self, qkv: Tensor, step: StepInputs, memory: KvCache) -> Tensor:
        """Store the keys and values of qkv[T, (H + 2 K) · D] in the cache; return the queries [T, H, D]."""
        heads = qkv.view(qkv.shape[0], -1, self.head_size)
        q, k, v = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = apply_norm(self.q_norm, q), apply_norm(self.k_norm, k)
        if self.rope is not None:
            q, k = self.rope(q, step.positions), self.rope(k, step.positions)
        self.ops.cache_write(k, v, memory.k, memory.v, step.slots[memory.group], memory.k_scale, memory.v_scale)
        return q

    def attend(self, q: Tensor, step: StepInputs, memory: KvCache) -> Tensor:
        """Attention of q[T, H, D] over the cache → [T, H · D]."""
        table = step.tables[memory.group]
        if step.tail is not None:
            y = self.ops.tree_attention(
                q, memory.k, memory.v, table, step.query_start, step.lengths, step.tail, self.scale, self.window,
                self.softcap, self.alibi, memory.k_scale, memory.v_scale, *self.sinks,
            )  # fmt: skip
            return y.flatten(1)
        y = self.ops.attention(
            q, memory.k, memory.v, table, step.query_start, step.lengths, self.scale, self.window, self.softcap,
            self.alibi, memory.k_scale, memory.v_scale, step.work, *self.sinks,
        )  # fmt: skip
        return y.flatten(1)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield from (("qkv", self.qkv), ("out", self.out))


class SinkAttention(Attention):
    """Attention with one more score per head, which takes weight but has no value."""

    def __init__(self, plain: Attention, sinks: Tensor) -> None:
        vars(self).update(vars(plain))
        self.sinks = (sinks,)


class TemperedAttention(Attention):
    """Attention whose queries are multiplied by factors[p, 0] of their position p."""

    def __init__(self, plain: Attention, factors: Tensor) -> None:
        vars(self).update(vars(plain))
        self.factors = factors

    def attend(self, q: Tensor, step: StepInputs, memory: KvCache) -> Tensor:
        scaled = self.ops.weigh(q.flatten(1), self.ops.gather(step.positions, self.factors))
        return super().attend(scaled.view(q.shape), step, memory)


class EncoderAttention:
    def __init__(self, ops: OpTable, qkv: Linear, out: Linear, num_heads: int, head_size: int, scale: float) -> None:
        self.ops, self.qkv, self.out = ops, qkv, out
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale

    def __call__(self, x: Tensor, step: StepInputs, memory: None = None) -> Tensor:
        return self.out(self.attend(self.qkv(x, step), step), step)

    def attend(self, qkv: Tensor, step: StepInputs) -> Tensor:
        """Attention within each sequence: qkv[T, 3 · H · D] → [T, H · D]."""
        q, k, v = qkv.view(qkv.shape[0], 3, self.num_heads, self.head_size).unbind(dim=1)
        return self.ops.encoder_attention(q, k, v, step.query_start, self.scale, step.work).flatten(1)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield from (("qkv", self.qkv), ("out", self.out))
