"""Attention: causal over the paged cache, or bidirectional within a sequence."""

from __future__ import annotations

from torch import Tensor

from penstock import ops
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm, RmsNorm
from penstock.layers.rope import RopeTable
from penstock.layers.step import LayerCache, Step


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    """x[T, H, D] normed over as many values at a time as the norm is wide."""
    if norm is None:
        return x
    num_tokens, num_heads, head_size = x.shape
    return norm(x.view(num_tokens, num_heads * head_size // norm.size, norm.size)).view(x.shape)


class Attention:
    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        rope: RopeTable | None = None,
        window: int = 0,
        softcap: float = 0.0,
        alibi: Tensor | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> None:
        self.qkv, self.out = qkv, out
        self.q_end, self.k_end, self.v_end = num_heads, num_heads + num_kv_heads, num_heads + 2 * num_kv_heads
        self.head_size, self.scale, self.rope = head_size, scale, rope
        self.window, self.softcap, self.alibi = window, softcap, alibi
        self.q_norm, self.k_norm = q_norm, k_norm
        self._norms = self._per_head(q_norm, k_norm)

    def _per_head(self, *norms: Norm | None) -> tuple[Tensor | None, Tensor | None, float] | None:
        """Both norms' weights and their eps, where one op can norm, rotate and store; else None."""
        present = [norm for norm in norms if norm is not None]
        if not all(isinstance(norm, RmsNorm) and norm.size == self.head_size for norm in present):
            return None
        epsilons = {norm.eps for norm in present if isinstance(norm, RmsNorm)} or {0.0}
        weights = [norm.weight if isinstance(norm, RmsNorm) else None for norm in norms]
        return (weights[0], weights[1], epsilons.pop()) if len(epsilons) == 1 else None

    def __call__(
        self, x: Tensor, step: Step, cache: LayerCache | None, residual: Tensor | None = None, norm: Norm | None = None
    ) -> Tensor:
        """`norm` is applied to x first."""
        if cache is None:
            raise ValueError("causal attention needs a cache")
        work = step.work
        if work is None or self._norms is None or cache.k_scale is not None or not ops.is_joined(work, self.window):
            return self.answers(self.queries(x, step, cache, norm), step, cache, residual)
        qkv, source, eps = self._projected(x, norm)
        y = ops.qkv_attention(
            qkv,
            cache.k,
            cache.v,
            step.slots[cache.group],
            step.positions,
            step.tables[cache.group],
            step.lengths,
            self.scale,
            self.window,
            self.softcap,
            self.alibi,
            *self._norms,
            *self._angles,
            source,
            eps,
            work.num_parts,
        )
        return self.out(y.flatten(1), residual)

    @property
    def _angles(self) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.rope is None else (self.rope.cos, self.rope.sin)

    def _projected(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor | None, float]:
        """Queries, keys and values of x, and where x's norm is still to be made up for, x and the norm's eps."""
        if self._norms is not None and isinstance(norm, RmsNorm):
            unnormed = self.qkv.unnormed(x, norm)
            if unnormed is not None:
                return unnormed[0], x, unnormed[1]
        return self.qkv(x, norm=norm), None, 0.0

    def queries(self, x: Tensor, step: Step, cache: LayerCache, norm: Norm | None = None) -> Tensor:
        """The first half: keys and values go to the cache; queries [T, H, D] come back."""
        qkv, source, eps = self._projected(x, norm)
        slots = step.slots[cache.group]
        if self._norms is not None:
            return ops.qkv_write(
                qkv,
                cache.k,
                cache.v,
                slots,
                step.positions,
                *self._norms,
                *self._angles,
                cache.k_scale,
                cache.v_scale,
                source,
                eps,
            )
        heads = qkv.view(qkv.shape[0], self.v_end, self.head_size)
        q = _normed(heads[:, : self.q_end], self.q_norm)
        k = _normed(heads[:, self.q_end : self.k_end], self.k_norm)
        if self.rope is not None:
            q, k = self.rope(q, step.positions), self.rope(k, step.positions)
        ops.cache_write(k, heads[:, self.k_end :], cache.k, cache.v, slots, cache.k_scale, cache.v_scale)
        return q

    def answers(self, q: Tensor, step: Step, cache: LayerCache, residual: Tensor | None = None) -> Tensor:
        """The second half."""
        y = ops.attention(
            q,
            cache.k,
            cache.v,
            step.tables[cache.group],
            step.query_start,
            step.lengths,
            self.scale,
            self.window,
            self.softcap,
            self.alibi,
            cache.k_scale,
            cache.v_scale,
            step.work,
        )
        return self.out(y.flatten(1), residual)


class EncoderAttention:
    def __init__(self, qkv: Linear, out: Linear, num_heads: int, head_size: int, scale: float) -> None:
        self.qkv, self.out, self.num_heads, self.head_size, self.scale = qkv, out, num_heads, head_size, scale

    def __call__(
        self, x: Tensor, step: Step, cache: LayerCache | None = None, residual: Tensor | None = None
    ) -> Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], 3, self.num_heads, self.head_size).unbind(dim=1)
        y = ops.encoder_attention(q, k, v, step.query_start, self.scale, step.work)
        return self.out(y.flatten(1), residual)
