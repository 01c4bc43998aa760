"""Multi-head latent attention as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.models.layer import Merges, RmsNorm, Rope, Shapes, add_prefix, matrix
from penstock.models.memory import LatentMemory

if TYPE_CHECKING:
    from torch import Tensor

    from penstock import layers
    from penstock.models.decoder import Build
    from penstock.quant.scheme import Scheme


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Causal attention whose keys and values are products of one latent per position."""

    prefix: ClassVar[str] = "attention"
    width: int
    num_heads: int
    query_rank: int  # of the queries' latent; 0: they are one product of x
    rank: int  # of the latent of keys and values
    nope_size: int  # numbers of a head that no position turns
    rope_size: int
    value_size: int
    scale: float
    rope: Rope
    eps: float  # of both norms
    bias: bool = False  # of the first products and the last

    @property
    def head_size(self) -> int:
        return self.nope_size + self.rope_size

    def parameters(self) -> Shapes:
        rows, inputs = self.num_heads * self.head_size, self.query_rank or self.width
        shapes: Shapes = {}
        if self.query_rank:
            shapes |= matrix("q_a", self.query_rank, self.width, self.bias)
            shapes |= add_prefix("q_norm", RmsNorm(self.query_rank, self.eps))
        return (
            shapes
            | matrix("q_b" if self.query_rank else "q", rows, inputs)
            | matrix("kv_a", self.rank + self.rope_size, self.width, self.bias)
            | add_prefix("kv_norm", RmsNorm(self.rank, self.eps))
            | matrix("kv_b", self.num_heads * (self.nope_size + self.value_size), self.rank)
            | matrix("out", self.width, self.num_heads * self.value_size, self.bias)
        )

    def merges(self) -> Merges:
        return {}

    def memory(self, max_model_len: int) -> LatentMemory:
        return LatentMemory(self.rank + self.rope_size, self.num_heads)

    def scratch_values(self) -> int:
        """Count the queries, and their absorbed form before and after attention."""
        return self.num_heads * (self.head_size + self.rope_size + 2 * self.rank + self.value_size) + 2 * self.rank

    def build(self, build: Build, name: str) -> layers.LatentAttention:
        from penstock import layers

        out = build.linear(f"{name}.out")
        kv_b = _shrink(build.take(f"{name}.kv_b.weight"), out.scheme).view(self.num_heads, -1, self.rank)
        absorb_key = build.heads(kv_b[:, : self.nope_size].transpose(1, 2))
        expand_value = build.heads(kv_b[:, self.nope_size :])
        rope = build.rope(self.rope)
        assert rope is not None
        return layers.LatentAttention(
            build.ops,
            self._build_query(build, name),
            build.linear(f"{name}.kv_a"),
            RmsNorm(self.rank, self.eps).build(build, f"{name}.kv_norm"),
            (absorb_key, expand_value),
            out,
            layers.LatentHead(self.nope_size, self.rope_size, self.rank, self.scale),
            rope,
        )

    def _build_query(self, build: Build, name: str) -> layers.Linear | layers.LowRankQuery:
        from penstock import layers

        if not self.query_rank:
            return build.linear(f"{name}.q")
        norm = RmsNorm(self.query_rank, self.eps).build(build, f"{name}.q_norm")
        return layers.LowRankQuery(build.linear(f"{name}.q_a"), norm, build.linear(f"{name}.q_b"))


def _shrink(weight: Tensor, beside: Scheme) -> Tensor:
    """On a CPU, store a float32 matrix in 16 bits beside a smaller one: the halves are multiplied per head, which
    quantized blocks cannot be."""
    is_small = weight.is_cpu and 8 * beside.num_bytes < 32 * beside.num_out * beside.num_in
    return weight.half() if weight.element_size() == 4 and is_small else weight
