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

    def __init__(
        self,
        attention: Attention,
        mlp: Mlp | GatedMlp,
        attention_norm: Norm | None,
        mlp_norm: Norm | None,
        attention_out_norm: Norm | None,
        mlp_out_norm: Norm | None,
        residual_scale: float = 1.0,
    ) -> None:
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
        if ends is None:
            y = self.attention(x, step, cache, self._residual(x, self.attention_out_norm), self.attention_norm)
        else:
            q = self.attention.queries(x, step, cache, self.attention_norm)
            if not len(ends.at):
                return x[:0]
            q, x = ends.of(q), ends.of(x)
            y = self.attention.answers(q, ends.step, cache, self._residual(x, self.attention_out_norm))
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
        if ends is None:
            return self.mlp(self._other(x, y), self.attention(y, step, cache, x))
        q = self.attention.queries(y, step, cache)
        if not len(ends.at):
            return x[:0]
        q, x, y = ends.of(q), ends.of(x), ends.of(y)
        return self.mlp(self._other(x, y), self.attention.answers(q, ends.step, cache, x))

    def _other(self, x: Tensor, y: Tensor) -> Tensor:
        """What the MLP reads of the stream x, whose attention reads y. It comes before attention is added to x."""
        return y if self.mlp_norm is None else self.mlp_norm(x)


class PostNormBlock:
    """The stream itself is normed after each addition."""

    def __init__(
        self, attention: Attention | EncoderAttention, mlp: Mlp | GatedMlp, attention_norm: Norm, mlp_norm: Norm
    ) -> None:
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = attention_norm, mlp_norm

    def __call__(self, x: Tensor, step: Step, cache: LayerCache | None, ends: Ends | None = None) -> Tensor:
        x = self.attention_norm(self.attention(x, step, cache, x))
        if ends is not None:
            x = ends.of(x)
        return self.mlp_norm(self.mlp(x, x)) if len(x) else x
