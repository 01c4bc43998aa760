"""Queries, keys and values as a decoder has them: rotated and stored, attended to, or both at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.op_inputs import EPS, Call, Inputs, OpCase
from penstock import ops
from penstock.runner.cuda.decode_batch import SharedPrefix, fill_shared, max_tiles

BLOCK = 16  # positions of a cache block
ALIGNED = 4  # numbers of 4 bytes: for other places kernels are compiled anew

Turns = tuple[Tensor | None, Tensor | None, float, Tensor, Tensor]  # norms of queries and keys, eps, cos, sin


class Attention(Inputs):
    def _pool(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Keys [N, K, D, P] and values [N, K, P, D]; keys lie like values, as a GPU has them."""
        pool = self._normal(num_blocks, 2, self.shape.num_kv_heads, BLOCK, self.shape.head_size)
        return pool[:, 0].transpose(2, 3), pool[:, 1]

    def _turns(self, num_positions: int) -> Turns:
        angles = torch.randn(num_positions, self.shape.head_size // 2, device=self.device)
        norms = [self._normal(self.shape.head_size).float() if self.shape.normed else None for _ in range(2)]
        return norms[0], norms[1], EPS, angles.cos(), angles.sin()

    def qkv_write(self) -> Iterator[OpCase]:
        s, width = self.shape, self.shape.matrices()["qkv"][0]
        turns = self._turns(1024)
        k, v = self._pool(4 * -(-max(self.sizes.rows) // BLOCK))
        for rows in self.sizes.rows:
            slots = torch.randperm(len(k) * BLOCK, device=self.device)[:rows]
            positions = torch.arange(rows, device=self.device) % 1024
            yield OpCase(
                "qkv_write",
                s.name,
                f"{rows} rows",
                [partial(ops.qkv_write, x, k, v, slots, positions, *turns) for x in self._wide(rows, width)],
                4.0 * rows * width,
            )

    def qkv_attention(self) -> Iterator[OpCase]:
        """A few sequences' queries, made where they are used; beside it the two ops that do the same."""
        sizes, shape = self.sizes, self.shape
        longest = max(sizes.joined_contexts)
        turns = self._turns(longest)
        positions = 3 * self._cache_bytes // shape.position_bytes + 2 * max(sizes.joined) * longest
        k, v = self._pool(-(-positions // BLOCK))
        order = torch.randperm(len(k), device=self.device).to(torch.int32)
        for rows in sizes.joined:
            for context in sizes.joined_contexts:
                yield self._joined(k, v, order, rows, context, turns)

    def _joined(self, k: Tensor, v: Tensor, order: Tensor, rows: int, context: int, turns: Turns) -> OpCase:
        from penstock.runner.cuda.decode_graphs import num_kv_splits

        s, width = self.shape, self.shape.matrices()["qkv"][0]
        moved = rows * context * s.position_bytes
        parts = num_kv_splits(rows, context, s.num_kv_heads, self._processors)
        work, scale = ops.Work(rows, None, parts), s.head_size**-0.5
        positions = torch.full((rows,), context - 1, device=self.device)
        lengths = (positions + 1).int()
        starts = torch.arange(rows + 1, dtype=torch.int32, device=self.device)

        def apart(x: Tensor, slots: Tensor, table: Tensor) -> Tensor:
            q = ops.qkv_write(x, k, v, slots, positions, *turns)
            return ops.attention(q, k, v, table, starts, lengths, scale, work=work)

        calls: list[Call] = []
        both: list[Call] = []
        q_norm, k_norm, eps, cos, sin = turns
        for table in self._tables(order, rows, -(-context // BLOCK), self._num_sets(moved)):
            x, slots = self._normal(rows, width), table[:, -1].long() * BLOCK + positions % BLOCK
            calls.append(
                partial(
                    ops.qkv_attention,
                    x,
                    k,
                    v,
                    slots,
                    positions,
                    table,
                    lengths,
                    scale,
                    q_norm=q_norm,
                    k_norm=k_norm,
                    eps=eps,
                    cos=cos,
                    sin=sin,
                    num_kv_splits=parts,
                )
            )
            both.append(partial(apart, x, slots, table))
        return OpCase(
            "qkv_attention",
            s.name,
            f"{rows} rows at {context}",
            calls,
            moved + 2.0 * rows * (width + s.num_heads * s.head_size),
            float(s.pair_ops) * rows * context,
            {"apart": both},
        )

    def _tables(self, order: Tensor, num_rows: int, num_blocks: int, num_sets: int) -> list[Tensor]:
        """Block tables, no block in two of them where the pool has enough."""
        size = num_rows * num_blocks
        firsts = [size * at % max(1, len(order) - size + 1) // ALIGNED * ALIGNED for at in range(num_sets)]
        return [order[first : first + size].view(num_rows, num_blocks) for first in firsts]

    def attention(self) -> Iterator[OpCase]:
        """Decoding, prompts, and many sequences with one beginning."""
        sizes, shape = self.sizes, self.shape
        largest = max(
            max(sizes.sampled) * max(sizes.contexts),
            max(n * (c + b) for n, c, b in sizes.chunks),
            sizes.shared[1] + sizes.shared[0] * sizes.shared[2],
            3 * self._cache_bytes // shape.position_bytes + max(sizes.contexts),
        )
        k, v = self._pool(-(-largest // BLOCK) + sizes.shared[0])
        order = torch.randperm(len(k), device=self.device).to(torch.int32)
        for rows in sizes.sampled:
            for context in sizes.contexts:
                yield self._decode(k, v, order, rows, context)
        for count, tokens, before in sizes.chunks:
            yield self._chunk(k, v, order, count, tokens, before)
        for sharing in (False, True):
            yield self._common(k, v, order, sharing)

    def _attend(
        self, k: Tensor, v: Tensor, tables: Sequence[Tensor], each: int, length: int, work: ops.Work
    ) -> list[Call]:
        s, count = self.shape, len(tables[0])
        starts = torch.arange(count + 1, dtype=torch.int32, device=self.device) * each
        lengths = torch.full((count,), length, dtype=torch.int32, device=self.device)
        q = self._normal(count * each, s.num_heads, s.head_size)
        return [
            partial(ops.attention, q, k, v, table, starts, lengths, s.head_size**-0.5, work=work) for table in tables
        ]

    def _decode(self, k: Tensor, v: Tensor, order: Tensor, rows: int, context: int) -> OpCase:
        from penstock.runner.cuda.decode_graphs import num_kv_splits

        s = self.shape
        moved = rows * context * s.position_bytes
        tables = self._tables(order, rows, -(-context // BLOCK), self._num_sets(moved))
        work = ops.Work(rows, None, num_kv_splits(rows, context, s.num_kv_heads, self._processors))
        others = {"sdpa": self._plain(rows, 1, context, False)} if moved < 5e9 else {}
        return OpCase(
            "attention",
            s.name,
            f"{rows} rows at {context}",
            self._attend(k, v, tables, 1, context, work),
            moved + 4.0 * rows * s.num_heads * s.head_size,
            float(s.pair_ops) * rows * context,
            others,
        )

    def _chunk(self, k: Tensor, v: Tensor, order: Tensor, count: int, tokens: int, before: int) -> OpCase:
        from penstock.ops.triton.attention.attention import tile_tokens

        s = self.shape
        size = tile_tokens(s.num_heads, s.num_kv_heads)
        tiles = torch.tensor(
            [(row, first) for first in range(0, tokens, size)[::-1] for row in range(count)],  # the longest first
            dtype=torch.int32,
            device=self.device,
        )
        length = before + tokens
        moved = count * (length * s.position_bytes + 4 * tokens * s.num_heads * s.head_size)
        tables = self._tables(order, count, -(-length // BLOCK), self._num_sets(moved))
        pairs = count * (tokens * before + tokens * (tokens + 1) // 2)
        others = (
            {}
            if before
            else {
                "flash": self._plain(count, tokens, tokens, True, "FLASH_ATTENTION"),
                "cudnn": self._plain(count, tokens, tokens, True, "CUDNN_ATTENTION"),
            }
        )
        return OpCase(
            "attention",
            s.name,
            f"{count} × {tokens} after {before}",
            self._attend(k, v, tables, tokens, length, ops.Work(0, tiles, longest=length)),
            moved,
            float(s.pair_ops) * pairs,
            others,
        )

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
        from penstock.ops.triton.attention.attention import tile_tokens
        from penstock.runner.cuda.decode_graphs import num_kv_splits, num_prefix_splits

        s, (rows, prefix, own) = self.shape, self.sizes.shared
        ahead, rest = prefix // BLOCK, -(-own // BLOCK)
        table = torch.cat([order[:ahead].expand(rows, ahead), order[ahead : ahead + rows * rest].view(rows, rest)], 1)
        size = tile_tokens(s.num_heads, s.num_kv_heads)
        members, skips = (np.zeros(rows, dtype=np.int32) for _ in range(2))
        tiles = np.zeros((max_tiles(rows, size), 4), dtype=np.int32)
        fill_shared([SharedPrefix(tuple(range(rows)), ahead * BLOCK)], size, members, skips, tiles)
        parts = [torch.from_numpy(part).to(self.device) for part in (members, skips, tiles)]
        num_common = num_prefix_splits(rows, size, s.num_kv_heads, self._processors)
        shared = ops.Shared(parts[0], parts[1], parts[2], num_common)
        work = ops.Work(
            rows, None, num_kv_splits(rows, prefix + own, s.num_kv_heads, self._processors), shared if sharing else None
        )
        read = (prefix if sharing else rows * prefix) + rows * own
        name = f"{rows} rows, {prefix} common + {own}"
        return OpCase(
            "attention",
            s.name,
            name if sharing else f"{name}, each alone",
            self._attend(k, v, [table.contiguous()], 1, prefix + own, work),
            float(read * s.position_bytes + 4 * rows * s.num_heads * s.head_size),
            float(s.pair_ops) * rows * (prefix + own),
        )
