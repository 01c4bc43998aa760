"""Layers as plain data: sizes and constants, the parameters a layer owns, the memory it keeps.

A description holds no tensors. `build` makes its layer of `penstock.layers` from the tensors a `Build` hands out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from penstock.models.memory import KvMemory, Memory

if TYPE_CHECKING:
    from torch import Tensor

    from penstock import layers
    from penstock.models.decoder import Build

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


class HasParameters(Protocol):
    def parameters(self) -> Shapes: ...


@dataclass(frozen=True)
class Merge:
    """A parameter that checkpoints may store in parts: (name, rows) in the order we hold them."""

    parts: tuple[tuple[str, int], ...]
    head_size: int = 0  # query, key and value parts: rows per head
    num_matrices: int = 1  # of a stack: checkpoints may store [E, O, C]


Merges = dict[str, Merge]


def add_prefix(prefix: str, part: HasParameters | None) -> Shapes:
    """Return the parameters of `part` with `prefix` before their names; none for an absent part."""
    return {} if part is None else {f"{prefix}.{name}": shape for name, shape in part.parameters().items()}


def matrix(name: str, num_out: int, num_in: int, bias: bool = False) -> Shapes:
    """A weight [out, in] and, where there is one, its bias [out]."""
    shapes: Shapes = {f"{name}.weight": (num_out, num_in)}
    if bias:
        shapes[f"{name}.bias"] = (num_out,)
    return shapes


def unite(shapes: Iterable[Shapes]) -> Shapes:
    return {name: shape for part in shapes for name, shape in part.items()}


class Part(Protocol):
    """A mixer or an FFN. `prefix` begins the names of its parameters."""

    prefix: ClassVar[str]

    def parameters(self) -> Shapes: ...

    def merges(self) -> Merges: ...

    def scratch_values(self) -> int:
        """Count the values per token that are in memory at once while the part is computed."""


class Mixer(Part, Protocol):
    def memory(self, max_model_len: int) -> Memory | None:
        """Describe what the mixer keeps between steps."""

    def build(self, build: Build, name: str) -> layers.Mixer: ...


class Ffn(Part, Protocol):
    def build(self, build: Build, name: str) -> layers.Ffn: ...


@dataclass(frozen=True)
class RmsNorm:
    size: int
    eps: float

    def parameters(self) -> Shapes:
        return {"weight": (self.size,)}

    def build(self, build: Build, name: str) -> layers.RmsNorm:
        from penstock import layers

        return layers.RmsNorm(build.ops, build.take(f"{name}.weight"), self.eps)


@dataclass(frozen=True)
class LayerNorm:
    size: int
    eps: float
    bias: bool = True

    def parameters(self) -> Shapes:
        return {name: (self.size,) for name in (("weight", "bias") if self.bias else ("weight",))}

    def build(self, build: Build, name: str) -> layers.LayerNorm:
        from penstock import layers

        bias = build.take(f"{name}.bias") if self.bias else None
        return layers.LayerNorm(build.ops, build.take(f"{name}.weight"), bias, self.eps)


@dataclass(frozen=True)
class UnitNorm:
    """An RMS norm without a weight."""

    size: int
    eps: float

    def parameters(self) -> Shapes:
        return {}

    def build(self, build: Build, name: str) -> layers.RmsNorm:
        import torch

        from penstock import layers

        return layers.RmsNorm(build.ops, torch.ones(self.size, device=build.device), self.eps)


Norm = RmsNorm | LayerNorm | UnitNorm


@dataclass(frozen=True)
class LinearScaling:
    factor: float
    attention_factor: ClassVar[float] = 1.0


@dataclass(frozen=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int  # positions of pretraining
    attention_factor: ClassVar[float] = 1.0


@dataclass(frozen=True)
class YarnScaling:
    factor: float
    original: int  # positions of pretraining
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongScaling:
    factors: tuple[float, ...]  # one per frequency, the short or the long list
    attention_factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True)
class Rope:
    """Rotary positions over the first `size` dimensions of each head. What depends on the length is resolved here."""

    size: int
    theta: float
    scaling: Scaling | None = None
    interleaved: bool = False  # dimension 2 i turns with 2 i + 1, instead of i with i + size / 2

    def frequencies(self) -> Tensor:
        """Compute the angle per position of each rotated pair, by the function of `layers.rope` that the scaling is
        named after, which takes its fields by name."""
        from penstock.layers import rope as ropes

        if self.scaling is None:
            return ropes.frequencies(self.size, self.theta)
        name = type(self.scaling).__name__.removesuffix("Scaling").lower()
        values = {key: value for key, value in asdict(self.scaling).items() if key != "attention_factor"}
        made: Tensor = getattr(ropes, f"{name}_frequencies")(self.size, self.theta, **values)
        return made

    @property
    def attention_factor(self) -> float:
        """The factor on sines and cosines."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor


@dataclass(frozen=True)
class Attention:
    """Causal attention over the paged cache."""

    prefix: ClassVar[str] = "attention"
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    rope: Rope | None = None
    window: int = 0  # a query at p sees p-window+1 … p; 0: all before it; negative: what its chunk of -window holds
    softcap: float = 0.0
    alibi: tuple[float, ...] = ()  # slope per head
    qkv_bias: bool = False
    out_bias: bool = False
    q_norm: Norm | None = None  # its size says over what: one head, or all of them together
    k_norm: Norm | None = None

    @property
    def rows(self) -> tuple[int, int, int]:
        """Outputs of the query, key and value projections."""
        return self.num_heads * self.head_size, self.num_kv_heads * self.head_size, self.num_kv_heads * self.head_size

    def parameters(self) -> Shapes:
        q, k, v = self.rows
        return unite(
            [
                matrix("qkv", q + k + v, self.width, self.qkv_bias),
                matrix("out", self.width, q, self.out_bias),
                add_prefix("q_norm", self.q_norm),
                add_prefix("k_norm", self.k_norm),
            ]
        )

    def merges(self) -> Merges:
        return {"qkv": Merge(tuple(zip("qkv", self.rows)), self.head_size)}

    def memory(self, max_model_len: int) -> KvMemory:
        window = abs(self.window)
        return KvMemory(self.num_kv_heads, self.head_size, window if window < max_model_len else 0, self.num_heads)

    def scratch_values(self) -> int:
        return sum(self.rows)

    def build(self, build: Build, name: str) -> layers.Attention:
        import torch

        from penstock import layers

        alibi = torch.tensor(self.alibi, dtype=torch.float32, device=build.device) if self.alibi else None
        q_norm = build.optional(f"{name}.q_norm", self.q_norm)
        k_norm = build.optional(f"{name}.k_norm", self.k_norm)
        return layers.Attention(
            build.ops,
            build.linear(f"{name}.qkv"),
            build.linear(f"{name}.out"),
            (self.num_heads, self.num_kv_heads, self.head_size),
            self.scale,
            build.rope(self.rope),
            self.window,
            self.softcap,
            alibi,
            q_norm,
            k_norm,
        )


@dataclass(frozen=True)
class SinkAttention(Attention):
    """Attention in which a learned score of each head takes weight but has no value."""

    def parameters(self) -> Shapes:
        return super().parameters() | {"sinks.weight": (self.num_heads,)}

    def build(self, build: Build, name: str) -> layers.SinkAttention:
        from penstock import layers

        return layers.SinkAttention(super().build(build, name), build.take(f"{name}.sinks.weight").float())


@dataclass(frozen=True)
class TemperedAttentionSpec(Attention):
    """Attention whose queries at position p are multiplied by 1 + strength · ln(1 + ⌊(p + 1) / stretch⌋)."""

    strength: float = 0.1
    stretch: int = 8192

    def build(self, build: Build, name: str) -> layers.TemperedAttention:
        import torch

        from penstock import layers

        positions = torch.arange(1, build.spec.max_model_len + 1, dtype=torch.float32, device=build.device)
        factors = torch.log1p(torch.floor(positions / self.stretch)) * self.strength + 1.0
        return layers.TemperedAttention(super().build(build, name), factors[:, None])


@dataclass(frozen=True)
class EncoderAttention:
    """Bidirectional attention within a sequence; nothing is remembered."""

    prefix: ClassVar[str] = "attention"
    width: int
    num_heads: int
    head_size: int
    scale: float
    bias: bool = True

    def parameters(self) -> Shapes:
        rows = self.num_heads * self.head_size
        return matrix("qkv", 3 * rows, self.width, self.bias) | matrix("out", self.width, rows, self.bias)

    def merges(self) -> Merges:
        rows = self.num_heads * self.head_size
        return {"qkv": Merge((("q", rows), ("k", rows), ("v", rows)), self.head_size)}

    def memory(self, max_model_len: int) -> None:
        return None

    def scratch_values(self) -> int:
        return 3 * self.num_heads * self.head_size

    def build(self, build: Build, name: str) -> layers.EncoderAttention:
        from penstock import layers

        qkv, out = build.linear(f"{name}.qkv"), build.linear(f"{name}.out")
        return layers.EncoderAttention(build.ops, qkv, out, self.num_heads, self.head_size, self.scale)


@dataclass(frozen=True)
class Mlp:
    """down(activation(up(x)))"""

    prefix: ClassVar[str] = "mlp"
    width: int
    hidden: int
    activation: str
    bias: bool = False

    def parameters(self) -> Shapes:
        return matrix("up", self.hidden, self.width, self.bias) | matrix("down", self.width, self.hidden, self.bias)

    def merges(self) -> Merges:
        return {}

    def scratch_values(self) -> int:
        return 2 * self.hidden

    def build(self, build: Build, name: str) -> layers.Mlp:
        from penstock import layers

        return layers.Mlp(build.ops, build.linear(f"{name}.up"), build.linear(f"{name}.down"), self.activation)


@dataclass(frozen=True)
class GatedMlp:
    """down(activation(gate(x)) · up(x))"""

    prefix: ClassVar[str] = "mlp"
    width: int
    hidden: int
    activation: str
    bias: bool = False

    def parameters(self) -> Shapes:
        return matrix("gate_up", 2 * self.hidden, self.width, self.bias) | matrix(
            "down", self.width, self.hidden, self.bias
        )

    def merges(self) -> Merges:
        return {"gate_up": Merge((("gate", self.hidden), ("up", self.hidden)))}

    def scratch_values(self) -> int:
        return 3 * self.hidden

    def build(self, build: Build, name: str) -> layers.GatedMlp:
        from penstock import layers

        gate_up, down = build.linear(f"{name}.gate_up"), build.linear(f"{name}.down")
        return layers.GatedMlp(build.ops, gate_up, down, self.activation)
