"""What an op is timed on: shapes of models, sizes of calls, inputs that together exceed a GPU's cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Call = Callable[[], object]
BF16 = torch.bfloat16
MOST_SETS = 400
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """A model, as its ops see it."""

    name: str
    width: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    normed: bool = False  # queries and keys

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs."""
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_size
        return {
            "qkv": (rows, self.width),
            "out": (self.width, self.num_heads * self.head_size),
            "gate_up": (2 * self.hidden, self.width),
            "down": (self.width, self.hidden),
            "head": (self.vocab_size, self.width),
        }

    @property
    def position_bytes(self) -> int:
        return 4 * self.num_kv_heads * self.head_size

    @property
    def pair_ops(self) -> int:
        return 4 * self.num_heads * self.head_size


@dataclass(frozen=True)
class Sizes:
    """How large the calls are."""

    rows: tuple[int, ...] = (1, 32, 256, 2048, 8192)
    product_rows: tuple[int, ...] = (1, 2, 8, 32, 64, 256, 2048, 8192)
    sampled: tuple[int, ...] = (1, 32, 256)
    contexts: tuple[int, ...] = (128, 512, 2048, 4096, 16384)
    joined: tuple[int, ...] = (2, 8, 32)  # sequences whose queries are made where they are used
    joined_contexts: tuple[int, ...] = (128, 512, 2048)
    chunks: tuple[tuple[int, int, int], ...] = (  # sequences, tokens, positions before them
        (64, 128, 0),
        (64, 512, 0),
        (8, 1024, 0),
        (4, 2048, 0),
        (16, 2048, 0),
        (1, 8192, 0),
        (1, 2048, 14336),
    )
    shared: tuple[int, int, int] = (256, 2048, 96)  # sequences, positions in common, positions of their own


@dataclass
class OpCase:
    """`calls` do the same on different inputs; `others` are other ways to do it."""

    op: str
    shape: str
    name: str
    calls: Sequence[Call]
    num_bytes: float  # read and written at least
    num_ops: float = 0.0
    others: Mapping[str, Sequence[Call]] = field(default_factory=dict)
    is_fp8: bool = False


class Inputs:
    """For one shape on one device."""

    def __init__(self, shape: Shape, device: str, cache_bytes: int, num_sms: int, sizes: Sizes | None = None) -> None:
        self.shape, self.device, self.sizes = shape, torch.device(device), sizes or Sizes()
        self._cache_bytes, self._processors = cache_bytes, num_sms

    def _normal(self, *size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, device=self.device, dtype=BF16).mul_(scale)

    def _num_sets(self, num_bytes: float) -> int:
        """So many that an input is no longer in the cache when its turn comes again."""
        return max(1, min(MOST_SETS, int(3 * self._cache_bytes // max(1.0, num_bytes)) + 1))

    def _wide(self, num_rows: int, width: int) -> list[Tensor]:
        return [self._normal(num_rows, width) for _ in range(self._num_sets(2 * num_rows * width))]
