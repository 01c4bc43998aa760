"""How attention and MLP meet the residual stream, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.models.layer import Attention, EncoderAttention, GatedMlp, Mlp, Norm, Shapes, nested, united


@dataclass(frozen=True)
class Block:
    """x + scale · out_norm(attention(norm(x))), then the same with the MLP; an absent norm passes x through."""

    attention: Attention
    mlp: Mlp | GatedMlp
    attention_norm: Norm | None = None
    mlp_norm: Norm | None = None
    attention_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    residual_scale: float = 1.0

    def parameters(self) -> Shapes:
        names = ("attention_norm", "attention", "attention_out_norm", "mlp_norm", "mlp", "mlp_out_norm")
        return united(nested(name, getattr(self, name)) for name in names)


@dataclass(frozen=True)
class ParallelBlock:
    """x + attention(norm(x)) + mlp(mlp_norm(x)); without mlp_norm both read the same normed x."""

    attention: Attention
    mlp: Mlp | GatedMlp
    attention_norm: Norm
    mlp_norm: Norm | None = None

    def parameters(self) -> Shapes:
        return united(nested(name, getattr(self, name)) for name in ("attention_norm", "attention", "mlp_norm", "mlp"))


@dataclass(frozen=True)
class PostNormBlock:
    """norm(x + attention(x)), then mlp_norm(x + mlp(x))."""

    attention: Attention | EncoderAttention
    mlp: Mlp | GatedMlp
    attention_norm: Norm
    mlp_norm: Norm

    def parameters(self) -> Shapes:
        return united(nested(name, getattr(self, name)) for name in ("attention", "attention_norm", "mlp", "mlp_norm"))


AnyBlock = Block | ParallelBlock | PostNormBlock
