"""The one decoder and the one encoder: a stack of layers between an embedding and a head or a pooling."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock import layers, ops
from penstock.models.pooling import Pooling, pool
from penstock.models.spec import ModelSpec

AnyBlock = layers.Block | layers.ParallelBlock | layers.PostNormBlock
AnyNorm = layers.RmsNorm | layers.LayerNorm


class Decoder:
    """Hidden states of a step's tokens, and the logits of those asked for."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: layers.Embedding,
        blocks: Sequence[AnyBlock],
        norm: AnyNorm | None,
        head: layers.Head,
    ) -> None:
        self.spec, self.embedding, self.blocks, self.norm, self.head = spec, embedding, list(blocks), norm, head

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows, over one, for which products take different kernels."""
        return getattr(self.blocks[0].mlp.down.scheme, "row_counts", (2,)) if self.blocks else (2,)

    def forward(
        self, step: layers.Step, caches: Sequence[layers.LayerCache | None], ends: layers.Ends | None = None
    ) -> Tensor:
        """The step's tokens → hidden [T, C], or with `ends` of those alone [M, C]; each layer's keys and values are
        written to its cache on the way."""
        x = self.embedding(step)
        last = len(self.blocks) - 1
        for index, (block, cache) in enumerate(zip(self.blocks, caches, strict=True)):
            x = block(x, step, cache, ends if index == last else None)
        return x if self.norm is None or not len(x) else self.norm(x)

    def logits(self, hidden: Tensor, at: Tensor | None = None) -> Tensor:
        """Rows at[M] of hidden [T, C], or all of them → [M, V] float32."""
        return self.head(hidden if at is None else ops.gather(at, hidden))


class Encoder:
    """Hidden states of whole sequences, and one embedding of each."""

    def __init__(
        self, spec: ModelSpec, embedding: layers.Embedding, blocks: Sequence[AnyBlock], pooling: Pooling
    ) -> None:
        self.spec, self.embedding, self.blocks, self.pooling = spec, embedding, list(blocks), pooling

    def forward(self, step: layers.Step, caches: Sequence[layers.LayerCache | None] = ()) -> Tensor:
        """The step's tokens → hidden [T, C]. Each sequence must be whole in the step."""
        x = self.embedding(step)
        for block in self.blocks:
            x = block(x, step, None)
        return x

    def pool(self, hidden: Tensor, query_start: Tensor) -> Tensor:
        """hidden [T, C] of S sequences → [S, C] float32."""
        return pool(hidden, query_start, self.pooling)
