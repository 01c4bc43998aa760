"""From descriptions to layers: parameters are taken one by one, in the order a step needs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock import layers
from penstock.errors import InvalidModel
from penstock.layers import rope as ropes
from penstock.models import block as blocks
from penstock.models import layer as described
from penstock.models.decoder import AnyBlock, AnyNorm, Decoder, Encoder
from penstock.models.pooling import Pooling
from penstock.models.spec import Embedding, Head, ModelSpec
from penstock.quant.dense import Dense
from penstock.quant.matrix import Matrix
from penstock.quant.scheme import Scheme

MAX_ROPE_BYTES = 1 << 30
CPU = torch.device("cpu")


class Build:
    """Makes layers out of `take(name)`, a tensor, and `hold(name, bias)`, a matrix in its storage scheme, both on the
    model's device."""

    def __init__(
        self,
        spec: ModelSpec,
        take: Callable[[str], Tensor],
        hold: Callable[[str, Tensor | None], Scheme],
        device: torch.device = CPU,
        final: Callable[[Scheme], Scheme] | None = None,
    ) -> None:
        self.spec, self.take, self.hold, self.device = spec, take, hold, device
        self._final = final  # what becomes of a layer's matrices once norms are part of them
        self.names = spec.parameters().keys()
        self.ropes: dict[described.Rope, layers.RopeTable] = {}

    def _optional(self, name: str) -> Tensor | None:
        return self.take(name) if name in self.names else None

    def matrix(self, name: str) -> Scheme:
        return self.hold(f"{name}.weight", self._optional(f"{name}.bias"))

    def linear(self, name: str) -> layers.Linear:
        return layers.Linear(self.matrix(name))

    def norm(self, name: str, norm: described.Norm | None) -> AnyNorm | None:
        return None if norm is None else self.some_norm(name, norm)

    def some_norm(self, name: str, norm: described.Norm) -> AnyNorm:
        weight = self.take(f"{name}.weight")
        if isinstance(norm, described.RmsNorm):
            return layers.RmsNorm(weight, norm.eps)
        return layers.LayerNorm(weight, self._optional(f"{name}.bias"), norm.eps)

    def rope(self, rope: described.Rope | None) -> layers.RopeTable | None:
        if rope is None:
            return None
        if rope not in self.ropes:
            length = self.spec.max_model_len
            if 4 * rope.size * length > MAX_ROPE_BYTES:
                raise InvalidModel(
                    f"max_model_len={length} needs {4 * rope.size * length} bytes of rope tables, over "
                    f"{MAX_ROPE_BYTES}: set a smaller max_model_len"
                )
            frequencies, factor = rope_frequencies(rope)
            self.ropes[rope] = layers.RopeTable(frequencies, length, factor, self.device)
        return self.ropes[rope]

    def attention(self, name: str, a: described.Attention) -> layers.Attention:
        return layers.Attention(
            self.linear(f"{name}.qkv"),
            self.linear(f"{name}.out"),
            a.num_heads,
            a.num_kv_heads,
            a.head_size,
            a.scale,
            self.rope(a.rope),
            a.window,
            a.softcap,
            self._alibi(a.alibi),
            self.norm(f"{name}.q_norm", a.q_norm),
            self.norm(f"{name}.k_norm", a.k_norm),
        )

    def _alibi(self, slopes: tuple[float, ...]) -> Tensor | None:
        return torch.tensor(slopes, dtype=torch.float32, device=self.device) if slopes else None

    def any_attention(
        self, name: str, a: described.Attention | described.EncoderAttention
    ) -> layers.Attention | layers.EncoderAttention:
        if isinstance(a, described.Attention):
            return self.attention(name, a)
        return layers.EncoderAttention(
            self.linear(f"{name}.qkv"), self.linear(f"{name}.out"), a.num_heads, a.head_size, a.scale
        )

    def mlp(self, name: str, mlp: described.Mlp | described.GatedMlp) -> layers.Mlp | layers.GatedMlp:
        if isinstance(mlp, described.GatedMlp):
            return layers.GatedMlp(self.linear(f"{name}.gate_up"), self.linear(f"{name}.down"), mlp.activation)
        return layers.Mlp(self.linear(f"{name}.up"), self.linear(f"{name}.down"), mlp.activation)

    def block(self, name: str, block: blocks.AnyBlock) -> AnyBlock:
        made = self._block(name, block)
        if self._final is not None:
            for linear in (made.attention.qkv, made.attention.out, _first(made.mlp), made.mlp.down):
                linear.scheme = self._final(linear.scheme)
        return made

    def _block(self, name: str, block: blocks.AnyBlock) -> AnyBlock:
        mlp = self.mlp(f"{name}.mlp", block.mlp)
        if isinstance(block, blocks.PostNormBlock):
            return layers.PostNormBlock(
                self.any_attention(f"{name}.attention", block.attention),
                mlp,
                self.some_norm(f"{name}.attention_norm", block.attention_norm),
                self.some_norm(f"{name}.mlp_norm", block.mlp_norm),
            )
        attention = self.attention(f"{name}.attention", block.attention)
        mlp_norm = self.norm(f"{name}.mlp_norm", block.mlp_norm)
        if isinstance(block, blocks.ParallelBlock):
            return layers.ParallelBlock(
                attention, mlp, self.some_norm(f"{name}.attention_norm", block.attention_norm), mlp_norm
            )
        attention_norm = self.norm(f"{name}.attention_norm", block.attention_norm)
        if self.device.type != "cpu":
            attention_norm, mlp_norm = folded(attention_norm, attention.qkv), folded(mlp_norm, _first(mlp))
        return layers.Block(
            attention,
            mlp,
            attention_norm,
            mlp_norm,
            self.norm(f"{name}.attention_out_norm", block.attention_out_norm),
            self.norm(f"{name}.mlp_out_norm", block.mlp_out_norm),
            block.residual_scale,
        )

    def embedding(self, e: Embedding) -> layers.Embedding:
        return layers.Embedding(
            self.matrix("embedding.tokens"),
            self.linear("embedding.project") if e.row != e.width else None,
            e.scale,
            dense(self.take("embedding.positions.weight")[e.position_offset :]) if e.num_positions else None,
            self.take("embedding.types.weight")[0].float().clone() if e.num_types else None,
            self.norm("embedding.norm", e.norm),
        )

    def head(self, head: Head, embedding: layers.Embedding) -> layers.Head:
        rows = embedding.tokens if head.tied else self.matrix("head.rows")
        project = self.linear("head.project") if head.row != head.width else None
        return layers.Head(rows, project, self._optional("head.bias"), head.divisor, head.softcap)

    def model(self, pooling: Pooling) -> Decoder | Encoder:
        embedding = self.embedding(self.spec.embedding)
        stack = [self.block(f"layers.{index}", block) for index, block in enumerate(self.spec.layers)]
        if self.spec.head is None:
            return Encoder(self.spec, embedding, stack, pooling)
        return Decoder(
            self.spec, embedding, stack, self.norm("norm", self.spec.norm), self.head(self.spec.head, embedding)
        )


def dense(weight: Tensor, bias: Tensor | None = None) -> Scheme:
    """In full precision, as the weight's device reads it best."""
    return Dense(weight, bias) if weight.is_cpu else Matrix(weight, bias)


def _first(mlp: layers.Mlp | layers.GatedMlp) -> layers.Linear:
    return mlp.gate_up if isinstance(mlp, layers.GatedMlp) else mlp.up


def folded(norm: AnyNorm | None, linear: layers.Linear) -> AnyNorm | None:
    """The norm, its weight made part of the product that it stands before where that is held in 16 bits: a product of
    one row then reads no weights of a norm."""
    if (
        not isinstance(norm, layers.RmsNorm)
        or norm.weight is None
        or not isinstance(linear.scheme, Matrix)
        or linear.scheme.weight.itemsize != 2
    ):
        return norm
    linear.scheme.fold(norm.weight)
    return layers.RmsNorm(None, norm.eps, norm.size)


def rope_frequencies(rope: described.Rope) -> tuple[Tensor, float]:
    """The angle per position of each rotated pair, and the factor on its sines and cosines."""
    scaling = rope.scaling
    if isinstance(scaling, described.LinearScaling):
        return ropes.linear_frequencies(rope.size, rope.theta, scaling.factor), 1.0
    if isinstance(scaling, described.Llama3Scaling):
        return ropes.llama3_frequencies(
            rope.size, rope.theta, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original
        ), 1.0
    if isinstance(scaling, described.YarnScaling):
        return ropes.yarn_frequencies(
            rope.size,
            rope.theta,
            scaling.factor,
            scaling.original,
            scaling.beta_fast,
            scaling.beta_slow,
            scaling.truncate,
        ), scaling.attention_factor
    if isinstance(scaling, described.LongScaling):
        return ropes.long_frequencies(rope.size, rope.theta, scaling.factors), scaling.attention_factor
    return ropes.frequencies(rope.size, rope.theta), 1.0
