"""Multi-head latent attention (DeepSeek-V2): one vector per position stands for the keys and values of all heads.

A head's key is [W_uk · c, k_rope] and its value W_uv · c, where the latent c and the rotated k_rope are made of the
token. Neither is ever computed: q · (W_uk · c) = (W_ukᵀ · q) · c and Σ w · (W_uv · c) = W_uv · Σ w · c, so W_uk is
absorbed into the queries and W_uv into the results, and attention runs over the latents themselves. Prompts and single
tokens are computed alike: one form of the sums keeps every chunking exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.layers.linear import Linear
from penstock.layers.memory import LatentCache
from penstock.layers.norm import Norm
from penstock.layers.rope import RopeTable
from penstock.layers.step import StepInputs
from penstock.ops import OpTable, pack_heads


class HeadLinear:
    """A matrix of its own for each head, [H, O, C], as panels."""

    def __init__(self, ops: OpTable, weights: Tensor) -> None:
        self.ops, self.num_out, self.panels = ops, weights.shape[1], pack_heads(weights)

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """x[T, H, C] → [T, H, O]."""
        return self.ops.head_linear(x, self.panels, self.num_out)


class HeadProduct:
    """A matrix of its own for each head, [H, O, C], as rows."""

    def __init__(self, ops: OpTable, weights: Tensor) -> None:
        self.ops, self.weights = ops, weights.contiguous()

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        return self.ops.head_product(x, self.weights)


Heads = Callable[[Tensor, StepInputs], Tensor]  # x[T, H, C] → [T, H, O]


@dataclass(frozen=True)
class LowRankQuery:
    """b(norm(a(x)))"""

    a: Linear
    norm: Norm
    b: Linear


@dataclass(frozen=True)
class LatentHead:
    nope: int  # numbers of a query and a key that no position turns
    rope: int  # those turned
    rank: int  # of the latent
    scale: float  # of the scores


class LatentAttention:
    def __init__(
        self,
        ops: OpTable,
        query: Linear | LowRankQuery,
        kv_a: Linear,
        kv_norm: Norm,
        absorbed: tuple[Heads, Heads],
        out: Linear,
        head: LatentHead,
        rope: RopeTable,
    ) -> None:
        """`absorbed`: W_ukᵀ [H, rank, nope] and W_uv [H, value, rank]."""
        self.ops, self.kv_a, self.kv_norm, self.out = ops, kv_a, kv_norm, out
        first, norm, last = (None, None, query) if isinstance(query, Linear) else (query.a, query.norm, query.b)
        self.q_a, self.q_norm, self.q = first, norm, last
        self.absorb_key, self.expand_value = absorbed
        self.head, self.rope = head, rope

    def __call__(self, x: Tensor, step: StepInputs, memory: LatentCache) -> Tensor:
        return self.out(self.attend(x, step, memory), step)

    def attend(self, x: Tensor, step: StepInputs, memory: LatentCache) -> Tensor:
        """Store the latents of x[T, C], and attend to the cache → [T, H · value]."""
        nope, rope, rank = self.head.nope, self.head.rope, self.head.rank
        q = self.query(x, step).view(len(x), -1, nope + rope)
        q_nope, q_rope = torch.split(q, [nope, rope], dim=2)
        latent, k_rope = torch.split(self.kv_a(x, step), [rank, rope], dim=1)
        k_rope = self.rope(k_rope.unsqueeze(1), step.positions).flatten(1)
        self.ops.latent_write(self.kv_norm(latent), k_rope, memory.latent, step.slots[memory.group])
        y = self.ops.latent_attention(
            self.absorb_key(q_nope, step), self.rope(q_rope, step.positions), memory.latent, step.tables[memory.group],
            step.query_start, step.lengths, self.head.scale, step.tail, step.work,
        )  # fmt: skip
        return self.expand_value(y, step).flatten(1)

    def query(self, x: Tensor, step: StepInputs) -> Tensor:
        if self.q_a is None or self.q_norm is None:
            return self.q(x, step)
        return self.q(self.q_norm(self.q_a(x, step)), step)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        if self.q_a is not None:
            yield "q_a", self.q_a
        yield "q" if self.q_a is None else "q_b", self.q
        yield from (("kv_a", self.kv_a), ("out", self.out))
