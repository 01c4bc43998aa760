"""One layer of the stack: a mixer and an FFN around the residual stream x[T, C]."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from penstock.layers.attention import Mixer
from penstock.layers.ffn import Ffn
from penstock.layers.norm import Norm
from penstock.layers.step import StepInputs
from penstock.ops import OpTable


class AnyBlock(Protocol):
    @property
    def mixer(self) -> Mixer: ...
    @property
    def ffn(self) -> Ffn | None: ...

    def __call__(self, x: Tensor, step: StepInputs, memory: Any) -> Tensor: ...


class Block:
    """Pre-norm: x + mixer(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, ops: OpTable, mixer: Mixer, ffn: Ffn, mixer_norm: Norm, ffn_norm: Norm) -> None:
        self.ops, self.mixer, self.ffn = ops, mixer, ffn
        self.mixer_norm, self.ffn_norm = mixer_norm, ffn_norm

    def __call__(self, x: Tensor, step: StepInputs, memory: Any) -> Tensor:
        x = self.ops.add(x, self.mixer(self.mixer_norm(x), step, memory))
        return self.ops.add(x, self.ffn(self.ffn_norm(x), step))


class MixerBlock:
    """x + mixer(norm(x)): a layer without an FFN."""

    ffn = None

    def __init__(self, ops: OpTable, mixer: Mixer, mixer_norm: Norm) -> None:
        self.ops, self.mixer, self.mixer_norm = ops, mixer, mixer_norm

    def __call__(self, x: Tensor, step: StepInputs, memory: Any) -> Tensor:
        return self.ops.add(x, self.mixer(self.mixer_norm(x), step, memory))


class ScaledBlock:
    """Pre-norm with a factor on what is added: x + scale · mixer(norm(x)), then x + scale · ffn(norm(x))."""

    def __init__(self, ops: OpTable, mixer: Mixer, ffn: Ffn, mixer_norm: Norm, ffn_norm: Norm, scale: float) -> None:
        self.ops, self.mixer, self.ffn, self.scale = ops, mixer, ffn, scale
        self.mixer_norm, self.ffn_norm = mixer_norm, ffn_norm

    def __call__(self, x: Tensor, step: StepInputs, memory: Any) -> Tensor:
        x = self.ops.add(x, self.mixer(self.mixer_norm(x), step, memory), self.scale)
        return self.ops.add(x, self.ffn(self.ffn_norm(x), step), self.scale)


class OutputNormBlock:
    """x + out_norm(mixer(norm(x))), then the same with the FFN; some models have no norm before."""

    def __init__(
        self,
        ops: OpTable,
        mixer: Mixer,
        ffn: Ffn,
        mixer_norm: Norm | None,
        ffn_norm: Norm | None,
        mixer_out_norm: Norm,
        ffn_out_norm: Norm,
    ) -> None:
        self.ops, self.mixer, self.ffn = ops, mixer, ffn
        self.mixer_norm, self.ffn_norm = mixer_norm, ffn_norm
        self.mixer_out_norm, self.ffn_out_norm = mixer_out_norm, ffn_out_norm

    def __call__(self, x: Tensor, step: StepInputs, memory: Any) -> Tensor:
        y = x if self.mixer_norm is None else self.mixer_norm(x)
        x = self.ops.add(x, self.mixer_out_norm(self.mixer(y, step, memory)))
        y = x if self.ffn_norm is None else self.ffn_norm(x)
        return self.ops.add(x, self.ffn_out_norm(self.ffn(y, step)))


class ParallelBlock:
    """x + mixer(norm(x)) + ffn(ffn_norm(x)); without an ffn_norm both read the same normed x."""

    def __init__(self, ops: OpTable, mixer: Mixer, ffn: Ffn, mixer_norm: Norm, ffn_norm: Norm | None) -> None:
        self.ops, self.mixer, self.ffn = ops, mixer, ffn
        self.mixer_norm, self.ffn_norm = mixer_norm, ffn_norm

    def __call__(self, x: Tensor, step: StepInputs, memory: Any) -> Tensor:
        y = self.mixer_norm(x)
        z = y if self.ffn_norm is None else self.ffn_norm(x)
        x = self.ops.add(x, self.mixer(y, step, memory))
        return self.ops.add(x, self.ffn(z, step))


class PostNormBlock:
    """norm(x + mixer(x)), then norm(x + ffn(x))."""

    def __init__(self, ops: OpTable, mixer: Mixer, ffn: Ffn, mixer_norm: Norm, ffn_norm: Norm) -> None:
        self.ops, self.mixer, self.ffn = ops, mixer, ffn
        self.mixer_norm, self.ffn_norm = mixer_norm, ffn_norm

    def __call__(self, x: Tensor, step: StepInputs, memory: Any) -> Tensor:
        x = self.mixer_norm(self.ops.add(x, self.mixer(x, step, memory)))
        return self.ffn_norm(self.ops.add(x, self.ffn(x, step)))
