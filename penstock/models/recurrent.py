"""Recurrent mixers as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.models.layer import Merges, RmsNorm, Shapes, add_prefix, matrix
from penstock.models.memory import RecurrentMemory

if TYPE_CHECKING:
    from penstock import layers
    from penstock.models.decoder import Build


@dataclass(frozen=True)
class Mamba2:
    """A state of [head_size, state_size] per head, and the last inputs of a short convolution before it."""

    prefix: ClassVar[str] = "mixer"
    num_kv_heads: ClassVar[int] = 0
    width: int
    num_heads: int
    head_size: int
    num_groups: int  # of heads that share b and c
    state_size: int
    kernel: int  # tokens that the convolution sees
    activation: str
    eps: float
    bias: bool = False
    conv_bias: bool = True
    norm_groups: int = 0  # that are normed by themselves; 0: as many as share b and c

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_size

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: x, b and c."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def norm(self) -> RmsNorm:
        return RmsNorm(self.inner, self.eps)

    def parameters(self) -> Shapes:
        channels, heads = self.num_channels, self.num_heads
        conv: Shapes = {"conv.weight": (channels, 1, self.kernel)}
        if self.conv_bias:
            conv["conv.bias"] = (channels,)
        return (
            matrix("in", self.inner + channels + heads, self.width, self.bias)
            | conv
            | {f"{name}.weight": (heads,) for name in ("a_log", "d", "dt_bias")}
            | add_prefix("norm", self.norm)
            | matrix("out", self.width, self.inner, self.bias)
        )

    def merges(self) -> Merges:
        return {}

    def memory(self, max_model_len: int) -> RecurrentMemory:
        """One row per head, and as many more as the convolution's inputs fill."""
        row_size = self.head_size * self.state_size
        return RecurrentMemory(self.num_heads + -(-(self.kernel - 1) * self.num_channels // row_size), row_size)

    def scratch_values(self) -> int:
        return 3 * self.inner + 2 * self.num_channels + self.num_heads

    def build(self, build: Build, name: str) -> layers.Mamba2:
        from penstock import layers

        conv_bias = build.take(f"{name}.conv.bias") if self.conv_bias else None
        conv = layers.CausalConv(build.ops, build.take(f"{name}.conv.weight")[:, 0], conv_bias, self.activation)
        a, d, dt_bias = (build.take(f"{name}.{each}.weight") for each in ("a_log", "d", "dt_bias"))
        shape = self.head_size, self.num_groups, self.state_size
        space = layers.StateSpace(build.ops, -a.exp(), d, dt_bias, shape)
        project, out = build.linear(f"{name}.in"), build.linear(f"{name}.out")
        groups = self.norm_groups or self.num_groups
        norm = layers.GroupedRmsNorm(build.ops, build.take(f"{name}.norm.weight"), self.eps, groups)
        return layers.Mamba2(build.ops, project, conv, space, norm, out)
