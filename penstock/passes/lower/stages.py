"""A block as a list of stages, so that rules can replace neighbours.

A stage reads and writes a `Flow`: the residual stream x, the branch y that will be added to it, and a second branch
that waits (`kept`). `open_block` takes a plain block apart; its stages one after the other are the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from penstock import layers
from penstock.ops import OpTable
from penstock.parallel import Mesh
from penstock.passes.shard.links import ReducedExperts


class Flow:
    __slots__ = ("kept", "memory", "step", "x", "y")

    def __init__(self, x: Tensor, step: layers.StepInputs, memory: Any) -> None:
        self.x, self.y, self.step, self.memory = x, x, step, memory
        self.kept: Tensor | None = None


class Stage(Protocol):
    def __call__(self, flow: Flow) -> None: ...


@dataclass(frozen=True)
class Branch:
    """y = norm(x). A folded norm's weight is part of the product after it: `norm` has ones, `folded` the weight."""

    norm: layers.Norm | None
    folded: Tensor | None = None

    def __call__(self, flow: Flow) -> None:
        flow.y = flow.x if self.norm is None else self.norm(flow.x)


@dataclass(frozen=True)
class Keep:
    """Set aside y, or norm(x), for later."""

    norm: layers.Norm | None

    def __call__(self, flow: Flow) -> None:
        flow.kept = flow.y if self.norm is None else self.norm(flow.x)


@dataclass(frozen=True)
class Resume:
    """y = what was kept."""

    def __call__(self, flow: Flow) -> None:
        assert flow.kept is not None
        flow.y = flow.kept


@dataclass(frozen=True)
class Product:
    """y = linear(y)"""

    linear: layers.Linear

    def __call__(self, flow: Flow) -> None:
        flow.y = self.linear(flow.y, flow.step)


@dataclass(frozen=True)
class Activate:
    """y = act(y), or act(gate) · up for y = [gate, up]."""

    ops: OpTable
    kind: str
    gated: bool

    def __call__(self, flow: Flow) -> None:
        flow.y = (self.ops.gated_activation if self.gated else self.ops.activation)(flow.y, self.kind)


@dataclass(frozen=True)
class Write:
    """y = the queries of y = qkv; keys and values go to the cache."""

    attention: layers.Attention

    def __call__(self, flow: Flow) -> None:
        flow.y = self.attention.write(flow.y, flow.step, flow.memory)


@dataclass(frozen=True)
class Attend:
    """y = attention of the queries y over the cache."""

    attention: layers.Attention

    def __call__(self, flow: Flow) -> None:
        flow.y = self.attention.attend(flow.y, flow.step, flow.memory)


@dataclass(frozen=True)
class EncoderAttend:
    attention: layers.EncoderAttention

    def __call__(self, flow: Flow) -> None:
        flow.y = self.attention.attend(flow.y, flow.step)


@dataclass(frozen=True)
class Mix:
    """y = mixer(y), for a mixer that is not taken apart."""

    mixer: layers.Mixer

    def __call__(self, flow: Flow) -> None:
        flow.y = self.mixer(flow.y, flow.step, flow.memory)


@dataclass(frozen=True)
class Feed:
    """y = ffn(y), for an FFN that is not taken apart."""

    ffn: layers.Ffn

    def __call__(self, flow: Flow) -> None:
        flow.y = self.ffn(flow.y, flow.step)


@dataclass(frozen=True)
class OutputNorm:
    """y = norm(y)"""

    norm: layers.Norm

    def __call__(self, flow: Flow) -> None:
        flow.y = self.norm(flow.y)


@dataclass(frozen=True)
class AddResidual:
    """x = x + scale · y"""

    ops: OpTable
    scale: float = 1.0

    def __call__(self, flow: Flow) -> None:
        flow.x = self.ops.add(flow.x, flow.y, self.scale)


@dataclass(frozen=True)
class StreamNorm:
    """x = norm(x)"""

    norm: layers.Norm

    def __call__(self, flow: Flow) -> None:
        flow.x = self.norm(flow.x)


@dataclass(frozen=True)
class FeedExperts:
    """y = experts(y)"""

    experts: layers.Experts

    def __call__(self, flow: Flow) -> None:
        flow.y = self.experts(flow.y, flow.step)


@dataclass(frozen=True)
class Reduce:
    """y = Σ y over the ranks"""

    mesh: Mesh

    def __call__(self, flow: Flow) -> None:
        flow.y = self.mesh.all_reduce(flow.y)


def _mix(mixer: layers.Mixer) -> list[Stage]:
    if isinstance(mixer, layers.Attention) and type(mixer) in (layers.Attention, layers.SinkAttention):
        return [Product(mixer.qkv), Write(mixer), Attend(mixer), Product(mixer.out)]
    if type(mixer) is layers.EncoderAttention:
        return [Product(mixer.qkv), EncoderAttend(mixer), Product(mixer.out)]
    return [Mix(mixer)]


def _feed(ffn: layers.Ffn) -> list[Stage]:
    if type(ffn) is layers.GatedMlp:
        return [Product(ffn.gate_up), Activate(ffn.ops, ffn.activation, True), Product(ffn.down)]
    if type(ffn) is layers.Mlp:
        return [Product(ffn.up), Activate(ffn.ops, ffn.activation, False), Product(ffn.down)]
    if isinstance(ffn, layers.Experts) and type(ffn) in (layers.Experts, layers.WeighedInputExperts):
        return [FeedExperts(ffn)]
    if type(ffn) is ReducedExperts:
        return [FeedExperts(ffn.experts), Reduce(ffn.mesh)]
    return [Feed(ffn)]


def _stages(b: layers.AnyBlock) -> Iterator[Stage | list[Stage]]:
    if isinstance(b, layers.MixerBlock):
        yield from (Branch(b.mixer_norm), _mix(b.mixer), AddResidual(b.ops))
    elif isinstance(b, layers.Block):
        yield from (Branch(b.mixer_norm), _mix(b.mixer), AddResidual(b.ops))
        yield from (Branch(b.ffn_norm), _feed(b.ffn), AddResidual(b.ops))
    elif isinstance(b, layers.ScaledBlock):
        yield from (Branch(b.mixer_norm), _mix(b.mixer), AddResidual(b.ops, b.scale))
        yield from (Branch(b.ffn_norm), _feed(b.ffn), AddResidual(b.ops, b.scale))
    elif isinstance(b, layers.OutputNormBlock):
        yield from (Branch(b.mixer_norm), _mix(b.mixer), OutputNorm(b.mixer_out_norm), AddResidual(b.ops))
        yield from (Branch(b.ffn_norm), _feed(b.ffn), OutputNorm(b.ffn_out_norm), AddResidual(b.ops))
    elif isinstance(b, layers.ParallelBlock):
        yield from (Branch(b.mixer_norm), Keep(b.ffn_norm), _mix(b.mixer), AddResidual(b.ops))
        yield from (Resume(), _feed(b.ffn), AddResidual(b.ops))
    elif isinstance(b, layers.PostNormBlock):
        yield from (Branch(None), _mix(b.mixer), AddResidual(b.ops), StreamNorm(b.mixer_norm))
        yield from (Branch(None), _feed(b.ffn), AddResidual(b.ops), StreamNorm(b.ffn_norm))


def open_block(block: layers.AnyBlock) -> list[Stage]:
    """Take a block apart; no stages for a kind of block that is not known here."""
    opened: list[Stage] = []
    for stage in _stages(block):
        opened += stage if isinstance(stage, list) else [stage]
    return opened
