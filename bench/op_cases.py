"""Calls of the ops as a decoder makes them, on inputs that together exceed a GPU's cache, and what each must move and
compute at least."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import ops
from penstock.ops.fp8_product import quantized as as_fp8
from penstock.runner.cuda.shared import Group, fill, num_tiles

Call = Callable[[], object]
BF16 = torch.bfloat16
BLOCK = 16                              # positions of a cache block
MOST_SETS = 400
ALIGNED = 4                             # numbers of 4 bytes: for other places kernels are compiled anew
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
    normed: bool = False                # queries and keys

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs."""
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_size
        return {"qkv": (rows, self.width), "out": (self.width, self.num_heads * self.head_size),
                "gate_up": (2 * self.hidden, self.width), "down": (self.width, self.hidden),
                "head": (self.vocab_size, self.width)}

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
    chunks: tuple[tuple[int, int, int], ...] = (        # sequences, tokens, positions before them
        (64, 128, 0), (8, 1024, 0), (4, 2048, 0), (1, 8192, 0), (1, 2048, 14336))
    shared: tuple[int, int, int] = (256, 2048, 96)      # sequences, positions in common, positions of their own


SHAPES = {"8b": Shape("8b", 4096, 14336, 32, 8, 128, 128256),
          "0.6b": Shape("0.6b", 1024, 3072, 16, 8, 128, 151936, normed=True)}


@dataclass
class OpCase:
    """`calls` do the same on different inputs; `others` are other ways to do it."""

    op: str
    shape: str
    name: str
    calls: Sequence[Call]
    num_bytes: float                    # read and written at least
    num_ops: float = 0.0
    others: Mapping[str, Sequence[Call]] = field(default_factory=dict)
    is_fp8: bool = False


class Maker:
    """The cases of one shape on one device."""

    def __init__(self, shape: Shape, device: str, cache_bytes: int, num_processors: int, sizes: Sizes | None = None,
                 ) -> None:
        self.shape, self.device, self.sizes = shape, torch.device(device), sizes or Sizes()
        self._cache_bytes, self._processors = cache_bytes, num_processors

    def _normal(self, *size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, device=self.device, dtype=BF16).mul_(scale)

    def _num_sets(self, num_bytes: float) -> int:
        """So many that an input is no longer in the cache when its turn comes again."""
        return max(1, min(MOST_SETS, int(3 * self._cache_bytes // max(1.0, num_bytes)) + 1))

    def _wide(self, num_rows: int, width: int) -> list[Tensor]:
        return [self._normal(num_rows, width) for _ in range(self._num_sets(2 * num_rows * width))]

    def rms_norm(self) -> Iterator[OpCase]:
        width = self.shape.width
        weight = self._normal(width)
        own = weight.float()
        for rows in self.sizes.rows:
            xs = self._wide(rows, width)
            yield OpCase("rms_norm", self.shape.name, f"{rows} rows",
                         [partial(ops.rms_norm, x, own, EPS) for x in xs], 4.0 * rows * width,
                         others={"torch": [partial(F.rms_norm, x, (width,), weight, EPS) for x in xs]})

    def activation(self) -> Iterator[OpCase]:
        hidden = self.shape.hidden
        for rows in self.sizes.rows:
            xs = self._wide(rows, 2 * hidden)
            yield OpCase("activation", self.shape.name, f"{rows} rows",
                         [partial(ops.gated_activation, x, "silu") for x in xs], 6.0 * rows * hidden)

    def _pool(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Keys [N, K, D, P] and values [N, K, P, D]; keys lie like values, as a GPU has them."""
        pool = self._normal(num_blocks, 2, self.shape.num_kv_heads, BLOCK, self.shape.head_size)
        return pool[:, 0].transpose(2, 3), pool[:, 1]

    def qkv_write(self) -> Iterator[OpCase]:
        s, width = self.shape, self.shape.matrices()["qkv"][0]
        angles = torch.randn(1024, s.head_size // 2, device=self.device)
        cos, sin = angles.cos(), angles.sin()
        norms = [self._normal(s.head_size).float() if s.normed else None for _ in range(2)]
        k, v = self._pool(4 * -(-max(self.sizes.rows) // BLOCK))
        for rows in self.sizes.rows:
            slots = torch.randperm(len(k) * BLOCK, device=self.device)[:rows]
            positions = torch.arange(rows, device=self.device) % 1024
            yield OpCase("qkv_write", s.name, f"{rows} rows",
                         [partial(ops.qkv_write, x, k, v, slots, positions, norms[0], norms[1], EPS, cos, sin)
                          for x in self._wide(rows, width)], 4.0 * rows * width)

    def _tables(self, order: Tensor, num_rows: int, num_blocks: int, num_sets: int) -> list[Tensor]:
        """Block tables, no block in two of them where the pool has enough."""
        size = num_rows * num_blocks
        firsts = [size * at % max(1, len(order) - size + 1) // ALIGNED * ALIGNED for at in range(num_sets)]
        return [order[first:first + size].view(num_rows, num_blocks) for first in firsts]

    def attention(self) -> Iterator[OpCase]:
        """Decoding, prompts, and many sequences with one beginning."""
        sizes, shape = self.sizes, self.shape
        largest = max(max(sizes.sampled) * max(sizes.contexts), max(n * (c + b) for n, c, b in sizes.chunks),
                      sizes.shared[1] + sizes.shared[0] * sizes.shared[2],
                      3 * self._cache_bytes // shape.position_bytes + max(sizes.contexts))
        k, v = self._pool(-(-largest // BLOCK) + sizes.shared[0])
        order = torch.randperm(len(k), device=self.device).to(torch.int32)
        for rows in sizes.sampled:
            for context in sizes.contexts:
                yield self._decode(k, v, order, rows, context)
        for count, tokens, before in sizes.chunks:
            yield self._chunk(k, v, order, count, tokens, before)
        for sharing in (False, True):
            yield self._common(k, v, order, sharing)

    def _attend(self, k: Tensor, v: Tensor, tables: Sequence[Tensor], each: int, length: int, work: ops.Work,
                ) -> list[Call]:
        s, count = self.shape, len(tables[0])
        starts = torch.arange(count + 1, dtype=torch.int32, device=self.device) * each
        lengths = torch.full((count,), length, dtype=torch.int32, device=self.device)
        q = self._normal(count * each, s.num_heads, s.head_size)
        return [partial(ops.attention, q, k, v, table, starts, lengths, s.head_size**-0.5, work=work)
                for table in tables]

    def _decode(self, k: Tensor, v: Tensor, order: Tensor, rows: int, context: int) -> OpCase:
        from penstock.runner.cuda.graphs import num_parts

        s = self.shape
        moved = rows * context * s.position_bytes
        tables = self._tables(order, rows, -(-context // BLOCK), self._num_sets(moved))
        work = ops.Work(rows, None, num_parts(rows, context, s.num_kv_heads, self._processors))
        others = {"sdpa": self._plain(rows, 1, context, False)} if moved < 5e9 else {}
        return OpCase("attention", s.name, f"{rows} rows at {context}",
                      self._attend(k, v, tables, 1, context, work),
                      moved + 4.0 * rows * s.num_heads * s.head_size, float(s.pair_ops) * rows * context, others)

    def _chunk(self, k: Tensor, v: Tensor, order: Tensor, count: int, tokens: int, before: int) -> OpCase:
        from penstock.ops.triton.attention import tile_tokens

        s = self.shape
        size = tile_tokens(s.num_heads, s.num_kv_heads)
        tiles = torch.tensor([(row, first) for row in range(count) for first in range(0, tokens, size)],
                             dtype=torch.int32, device=self.device)
        length = before + tokens
        moved = count * (length * s.position_bytes + 4 * tokens * s.num_heads * s.head_size)
        tables = self._tables(order, count, -(-length // BLOCK), self._num_sets(moved))
        pairs = count * (tokens * before + tokens * (tokens + 1) // 2)
        others = {} if before else {"flash": self._plain(count, tokens, tokens, True, "FLASH_ATTENTION"),
                                    "cudnn": self._plain(count, tokens, tokens, True, "CUDNN_ATTENTION")}
        return OpCase("attention", s.name, f"{count} × {tokens} after {before}",
                      self._attend(k, v, tables, tokens, length, ops.Work(0, tiles)), moved,
                      float(s.pair_ops) * pairs, others)

    def _plain(self, rows: int, each: int, length: int, causal: bool, backend: str = "") -> list[Call]:
        """torch's own attention, with keys and values in one piece."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        s = self.shape
        num = self._num_sets(rows * length * s.position_bytes)
        q = self._normal(rows, s.num_heads, each, s.head_size)
        sets = [[self._normal(rows, s.num_kv_heads, length, s.head_size) for _ in range(2)] for _ in range(num)]

        def call(k: Tensor, v: Tensor) -> Tensor:
            if not backend:
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

        return [partial(call, k, v) for k, v in sets]

    def _common(self, k: Tensor, v: Tensor, order: Tensor, sharing: bool) -> OpCase:
        """The same tables with the beginning read once for all, and once for each."""
        from penstock.ops.triton.attention import tile_tokens
        from penstock.runner.cuda.graphs import num_common_parts, num_parts

        s, (rows, prefix, own) = self.shape, self.sizes.shared
        ahead, rest = prefix // BLOCK, -(-own // BLOCK)
        table = torch.cat([order[:ahead].expand(rows, ahead), order[ahead:ahead + rows * rest].view(rows, rest)], 1)
        size = tile_tokens(s.num_heads, s.num_kv_heads)
        members, skips = (np.zeros(rows, dtype=np.int32) for _ in range(2))
        tiles = np.zeros((num_tiles(rows, size), 4), dtype=np.int32)
        fill([Group(tuple(range(rows)), ahead * BLOCK)], size, members, skips, tiles)
        parts = [torch.from_numpy(part).to(self.device) for part in (members, skips, tiles)]
        num_common = num_common_parts(rows, size, s.num_kv_heads, self._processors)
        shared = ops.Shared(parts[0], parts[1], parts[2], num_common)
        work = ops.Work(rows, None, num_parts(rows, prefix + own, s.num_kv_heads, self._processors),
                        shared if sharing else None)
        read = (prefix if sharing else rows * prefix) + rows * own
        name = f"{rows} rows, {prefix} common + {own}"
        return OpCase("attention", s.name, name if sharing else f"{name}, each alone",
                      self._attend(k, v, [table.contiguous()], 1, prefix + own, work),
                      float(read * s.position_bytes + 4 * rows * s.num_heads * s.head_size),
                      float(s.pair_ops) * rows * (prefix + own))

    def _rows_of(self, matrix: str, all_rows: Sequence[int]) -> list[int]:
        """A step has few logits."""
        return [rows for rows in all_rows if matrix != "head" or rows <= max(self.sizes.sampled)]

    def product(self) -> Iterator[OpCase]:
        """Each matrix with what the layer has it do besides: norm, activation, residual."""
        for matrix, (num_out, num_in) in self.shape.matrices().items():
            weights = [self._normal(num_out, num_in, scale=num_in**-0.5)
                       for _ in range(self._num_sets(2 * num_out * num_in))]
            for rows in self._rows_of(matrix, self.sizes.product_rows):
                num = min(len(weights), self._num_sets(2 * (num_out * num_in + rows * num_in)))
                xs = [self._normal(rows, num_in) for _ in range(num)]
                calls = [partial(ops.product, x, w, *_finish(matrix, self._added(matrix, rows, num_out)))
                         for x, w in zip(xs, weights)]
                plain: list[Call] = [partial(torch.mm, x, w.t()) for x, w in zip(xs, weights)]
                yield OpCase("product", self.shape.name, f"{matrix} {num_out}×{num_in}, {rows} rows", calls,
                             2.0 * (num_out * num_in + rows * (num_in + num_out)), 2.0 * rows * num_out * num_in,
                             {"torch.mm": plain})

    def fp8_product(self) -> Iterator[OpCase]:
        one = torch.ones((), device=self.device)
        for matrix, (num_out, num_in) in self.shape.matrices().items():
            if matrix == "head":
                continue
            weights = [as_fp8(self._normal(num_out, num_in, scale=num_in**-0.5))
                       for _ in range(self._num_sets(num_out * num_in))]
            for rows in self.sizes.product_rows:
                num = min(len(weights), self._num_sets(num_out * num_in + 2 * rows * num_in))
                xs = [self._normal(rows, num_in) for _ in range(num)]
                calls = [partial(ops.fp8_product, x, w, scale, *_finish(matrix, self._added(matrix, rows, num_out)))
                         for x, (w, scale) in zip(xs, weights)]
                plain: list[Call] = [partial(torch._scaled_mm, x.to(w.dtype), w.t(), scale_a=one, scale_b=one,
                                             out_dtype=BF16) for x, (w, _) in zip(xs, weights)] if rows > 1 else []
                yield OpCase("fp8_product", self.shape.name, f"{matrix} {num_out}×{num_in}, {rows} rows", calls,
                             num_out * num_in + 2.0 * rows * (num_in + num_out), 2.0 * rows * num_out * num_in,
                             {"_scaled_mm": plain} if plain else {}, is_fp8=True)

    def _added(self, matrix: str, rows: int, num_out: int) -> Tensor | None:
        return self._normal(rows, num_out) if matrix in ("out", "down") else None

    def sample(self) -> Iterator[OpCase]:
        size = self.shape.vocab_size
        for rows in self.sizes.sampled:
            heat = torch.ones(rows, device=self.device)
            keys = torch.randint(1 << 60, (rows,), device=self.device)
            places = torch.arange(rows, device=self.device)
            yield OpCase("sample", self.shape.name, f"{rows} × {size}",
                         [partial(ops.sample, logits, heat, keys, places) for logits in self._wide(rows, size)],
                         2.0 * rows * size)


def _finish(matrix: str, residual: Tensor | None) -> tuple[None, Tensor | None, str | None, bool, None, float]:
    """bias, residual, activation, gated, norm, eps, as a layer gives them."""
    gated = matrix == "gate_up"
    return None, residual, "silu" if gated else None, gated, None, EPS if matrix in ("qkv", "gate_up") else 0.0
