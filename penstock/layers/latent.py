"""Multi-head latent attention (DeepSeek-V2): one vector per position stands for the keys and values of all heads.

A head's key is [W_uk · c, k_rope] and its value W_uv · c, where the latent c and the rotated k_rope are made of the
token. Neither is ever computed: q · (W_uk · c) = (W_ukᵀ · q) · c and Σ w · (W_uv · c) = W_uv · Σ w · c, so W_uk is
absorbed into the queries and W_uv into the results, and attention runs over the latents themselves. Prompts and single
tokens are computed alike: one form of the sums keeps every chunking exact.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """A matrix of its own for each head, [H, O, C]."""

    def __init__(self, ops: OpTable, weights: Tensor) -> None:
        self.ops, self.num_out, self.panels = ops, weights.shape[1], pack_heads(weights)

    def __call__(self, x: Tensor) -> Tensor:
        """x[T, H, C] → [T, H, O]."""
        return self.ops.head_linear(x, self.panels, self.num_out)


class LowRankQuery:
    """b(norm(a(x)))"""

    def __init__(self, a: Linear, norm: Norm, b: Linear) -> None:
        self.a, self.norm, self.b = a, norm, b

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        return self.b(self.norm(self.a(x, step)), step)


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
        absorbed: tuple[HeadLinear, HeadLinear],
        out: Linear,
        head: LatentHead,
        rope: RopeTable,
    ) -> None:
        """`absorbed`: W_ukᵀ [H, rank, nope] and W_uv [H, value, rank]."""
        self.ops, self.query, self.kv_a, self.kv_norm, self.out = ops, query, kv_a, kv_norm, out
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
            self.absorb_key(q_nope), self.rope(q_rope, step.positions), memory.latent, step.tables[memory.group],
            step.query_start, step.lengths, self.head.scale, step.tail,
        )  # fmt: skip
        return self.expand_value(y).flatten(1)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        if isinstance(self.query, LowRankQuery):
            yield from (("q_a", self.query.a), ("q_b", self.query.b))
        else:
            yield "q", self.query
        yield from (("kv_a", self.kv_a), ("out", self.out))
