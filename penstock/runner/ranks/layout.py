"""Places of ranks: which stage, which share of its matrices, which machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankLayout:
    """Rank 0 is on the last stage, since it samples: the hidden states of earlier stages flow towards it."""

    num_shards: int = 1  # tensor parallel
    num_stages: int = 1  # pipeline parallel
    num_nodes: int = 1

    @property
    def num_ranks(self) -> int:
        return self.num_shards * self.num_stages

    def stage(self, rank: int) -> int:
        return self.num_stages - 1 - rank // self.num_shards

    def shard(self, rank: int) -> int:
        return rank % self.num_shards

    def node(self, rank: int) -> int:
        return rank * self.num_nodes // self.num_ranks

    def list_ranks(self, node: int) -> list[int]:
        return [rank for rank in range(self.num_ranks) if self.node(rank) == node]

    def find_next(self, rank: int) -> int | None:
        """Return the rank that gets this one's hidden states; None on the last stage."""
        return rank - self.num_shards if rank >= self.num_shards else None
