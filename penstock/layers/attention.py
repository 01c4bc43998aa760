"""Attention: causal over the paged cache, or bidirectional within a sequence."""

from __future__ import annotations

from torch import Tensor

from penstock import ops
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm
from penstock.layers.rope import RopeTable
from penstock.layers.step import LayerCache, Step


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    """x[T, H, D] normed over as many values at a time as the norm is wide."""
    if norm is None:
        return x
    num_tokens, num_heads, head_size = x.shape
    return norm(x.reshape(num_tokens, num_heads * head_size // norm.size, norm.size)).view(x.shape)


class Attention:
    def __init__(self, qkv: Linear, out: Linear, num_heads: int, num_kv_heads: int, head_size: int, scale: float,
                 rope: RopeTable | None = None, window: int = 0, softcap: float = 0.0, alibi: Tensor | None = None,
                 q_norm: Norm | None = None, k_norm: Norm | None = None) -> None:
        self.qkv, self.out = qkv, out
        self.q_end, self.k_end, self.v_end = num_heads, num_heads + num_kv_heads, num_heads + 2 * num_kv_heads
        self.head_size, self.scale, self.rope = head_size, scale, rope
        self.window, self.softcap, self.alibi = window, softcap, alibi
        self.q_norm, self.k_norm = q_norm, k_norm

    def __call__(self, x: Tensor, step: Step, cache: LayerCache | None, residual: Tensor | None = None) -> Tensor:
        if cache is None:
            raise ValueError("causal attention needs a cache")
        qkv = self.qkv(x).view(x.shape[0], self.v_end, self.head_size)
        q = _normed(qkv[:, :self.q_end], self.q_norm)
        k = _normed(qkv[:, self.q_end:self.k_end], self.k_norm)
        v = qkv[:, self.k_end:]
        if self.rope is not None:
            q, k = self.rope(q, step.positions), self.rope(k, step.positions)
        ops.cache_write(k, v, cache.k, cache.v, step.slots[cache.group])
        y = ops.attention(q, cache.k, cache.v, step.tables[cache.group], step.query_start, step.lengths,
                          self.scale, self.window, self.softcap, self.alibi)
        return self.out(y.flatten(1), residual)


class EncoderAttention:
    def __init__(self, qkv: Linear, out: Linear, num_heads: int, head_size: int, scale: float) -> None:
        self.qkv, self.out, self.num_heads, self.head_size, self.scale = qkv, out, num_heads, head_size, scale

    def __call__(self, x: Tensor, step: Step, cache: LayerCache | None = None,
                 residual: Tensor | None = None) -> Tensor:
        parts = self.qkv(x).view(x.shape[0], 3, self.num_heads, self.head_size).unbind(dim=1)
        q, k, v = (part.contiguous() for part in parts)
        return self.out(ops.encoder_attention(q, k, v, step.query_start, self.scale).flatten(1), residual)
