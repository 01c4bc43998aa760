"""One layer of the stack: attention and MLP around the residual stream x[T, C]."""

from __future__ import annotations

from torch import Tensor

from penstock import ops
from penstock.layers.attention import Attention, EncoderAttention
from penstock.layers.mlp import GatedMlp, Mlp
from penstock.layers.norm import Norm
from penstock.layers.step import Ends, LayerCache, Step


class Block:
    """Serial: each half reads the normed stream and adds its (normed, scaled) result to it."""

    def __init__(self, attention: Attention, mlp: Mlp | GatedMlp, attention_norm: Norm | None, mlp_norm: Norm | None,
                 attention_out_norm: Norm | None, mlp_out_norm: Norm | None, residual_scale: float = 1.0) -> None:
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = attention_norm, mlp_norm
        self.attention_out_norm, self.mlp_out_norm = attention_out_norm, mlp_out_norm
        self.residual_scale = residual_scale

    def _residual(self, x: Tensor, norm: Norm | None) -> Tensor | None:
        """The stream, where the half itself can add its result to it."""
        return x if norm is None and self.residual_scale == 1.0 else None

    def _added(self, x: Tensor, y: Tensor, norm: Norm | None) -> Tensor:
        """The stream after a half whose result is y."""
        if self.residual_scale == 1.0:
            return y if norm is None else norm(y, residual=x)
        return ops.add(x, y if norm is None else norm(y), self.residual_scale)

    def __call__(self, x: Tensor, step: Step, cache: LayerCache | None, ends: Ends | None = None) -> Tensor:
        if cache is None:
            raise ValueError("a layer needs its cache")
        q = self.attention.queries(x, step, cache, self.attention_norm)
        if ends is not None:
            if not len(ends.at):
                return x[:0]
            q, x, step = ends.of(q), ends.of(x), ends.step
        y = self.attention.answers(q, step, cache, self._residual(x, self.attention_out_norm))
        x = self._added(x, y, self.attention_out_norm)
        y = self.mlp(x, self._residual(x, self.mlp_out_norm), self.mlp_norm)
        return self._added(x, y, self.mlp_out_norm)


class ParallelBlock:
    """Side by side: both halves read the same stream."""

    def __init__(self, attention: Attention, mlp: Mlp | GatedMlp, attention_norm: Norm, mlp_norm: Norm | None) -> None:
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = attention_norm, mlp_norm

    def __call__(self, x: Tensor, step: Step, cache: LayerCache | None, ends: Ends | None = None) -> Tensor:
        if cache is None:
            raise ValueError("a layer needs its cache")
        y = self.attention_norm(x)
        q = self.attention.queries(y, step, cache)
        if ends is not None:
            if not len(ends.at):
                return x[:0]
            q, x, y, step = ends.of(q), ends.of(x), ends.of(y), ends.step
        z = y if self.mlp_norm is None else self.mlp_norm(x)
        return self.mlp(z, self.attention.answers(q, step, cache, x))


class PostNormBlock:
    """The stream itself is normed after each addition."""

    def __init__(self, attention: Attention | EncoderAttention, mlp: Mlp | GatedMlp, attention_norm: Norm,
                 mlp_norm: Norm) -> None:
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = attention_norm, mlp_norm

    def __call__(self, x: Tensor, step: Step, cache: LayerCache | None, ends: Ends | None = None) -> Tensor:
        x = self.attention_norm(self.attention(x, step, cache, x))
        if ends is not None:
            x = ends.of(x)
        return self.mlp_norm(self.mlp(x, x)) if len(x) else x
