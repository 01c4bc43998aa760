"""CPU bodies of attention over latents."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention.attention import Work
from penstock.ops.attention.latent_attention import latent_attention
from penstock.ops.attention.latent_write import latent_move, latent_write
from penstock.ops.attention.tree_attention import Tail
from penstock.ops.cpu.runtime.library import TYPES, Kernel, as_integers, as_rows, empty_like, pointer

_attention = Kernel("latent_attention", "pppninnpnnppnnnnfpppnnp")
_write = Kernel("latent_write", "pnpnpnipnnnnn")
_move = Kernel("latent_move", "pnipnnnn")


def _check_cache(cache: Tensor) -> tuple[int, int, int]:
    """Return the address, the block stride and the type."""
    if cache.dtype not in TYPES or cache.stride()[1:] != (cache.shape[2], 1):
        raise ValueError(
            f"the cache is {cache.dtype}{list(cache.shape)} with the strides {cache.stride()}: latents are 16- or "
            "32-bit floats [N, P, W], each block contiguous"
        )
    return cache.data_ptr(), cache.stride(0), TYPES[cache.dtype]


@latent_write.impl("cpu", exact=True)
def _latent_write(latent: Tensor, k_rope: Tensor, cache: Tensor, slots: Tensor) -> None:
    target = _check_cache(cache)
    latent, k_rope, slots = as_rows("latent", latent), as_rows("k_rope", k_rope), as_integers(slots, torch.int64)
    num_blocks, size, width = cache.shape
    num_tokens, rank = latent.shape
    if k_rope.shape != (num_tokens, width - rank) or slots.shape != (num_tokens,):
        raise ValueError(
            f"latent {tuple(latent.shape)}, k_rope {tuple(k_rope.shape)} and slots {tuple(slots.shape)} do not fit a "
            f"cache {tuple(cache.shape)}"
        )
    _write(
        latent.data_ptr(), latent.stride(0), k_rope.data_ptr(), k_rope.stride(0), *target, slots.data_ptr(),
        num_tokens, num_blocks, size, rank, width,
    )  # fmt: skip


@latent_move.impl("cpu", exact=True)
def _latent_move(cache: Tensor, moves: Tensor) -> None:
    target = _check_cache(cache)
    moves = as_integers(moves, torch.int64)
    if moves.dim() != 2 or moves.shape[1] != 2:
        raise ValueError(f"moves {tuple(moves.shape)} must be [n, 2]: a source and a target each")
    _move(*target, moves.data_ptr(), moves.shape[0], *cache.shape)


def _check_tail(tail: Tail, num_tokens: int, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    begins, nodes = as_integers(tail.begins, torch.int32), as_integers(tail.nodes, torch.int32)
    positions = as_integers(tail.positions, torch.int64)
    if begins.shape[0] != num_sequences or positions.shape[0] != num_tokens or nodes.shape[0] != num_tokens:
        shapes = ", ".join(str(tuple(x.shape)) for x in tail)
        raise ValueError(f"the tail's {shapes} do not fit {num_tokens} queries of {num_sequences} sequences")
    return begins, positions, nodes


@latent_attention.impl("cpu", exact=True)
def _latent_attention(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    table: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    scale: float,
    tail: Tail | None = None,
    work: Work | None = None,
) -> Tensor:
    address, stride, number = _check_cache(cache)
    q, q_rope = as_rows("q", q).contiguous(), as_rows("q_rope", q_rope).contiguous()
    table, query_start, lengths = (as_integers(x, torch.int32) for x in (table, query_start, lengths))
    (num_tokens, num_heads, rank), (num_blocks, size, width) = q.shape, cache.shape
    num_sequences = lengths.shape[0]
    if q_rope.shape != (num_tokens, num_heads, width - rank):
        raise ValueError(f"q {tuple(q.shape)} and q_rope {tuple(q_rope.shape)} do not fit a cache {tuple(cache.shape)}")
    if table.shape[0] != num_sequences or query_start.shape[0] != num_sequences + 1:
        raise ValueError(
            f"table {tuple(table.shape)} and query_start {tuple(query_start.shape)} do not fit {num_sequences} lengths"
        )
    path = None if tail is None else _check_tail(tail, num_tokens, num_sequences)
    begins, positions, nodes = path or (None, None, None)
    out = empty_like(q)
    _attention(
        q.data_ptr(), q_rope.data_ptr(), address, stride, number, num_blocks, size, table.data_ptr(), table.stride(0),
        table.shape[1], query_start.data_ptr(), lengths.data_ptr(), num_sequences, num_heads, rank, width, scale,
        pointer(begins), pointer(positions), pointer(nodes), *(nodes.stride(0), nodes.shape[1]) if nodes is not None
        else (0, 0), out.data_ptr(),
    )  # fmt: skip
    return out
