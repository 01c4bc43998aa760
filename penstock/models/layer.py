"""What a layer is, as plain data: sizes and constants, the parameters it owns, the state it keeps.

A description holds no tensors and no code that computes; `build.py` turns it into a layer of `penstock.layers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from penstock.cache.layout import KvLayout
from penstock.cache.state import StateSpec

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


class HasParameters(Protocol):
    def parameters(self) -> Shapes: ...


@dataclass(frozen=True)
class Merge:
    """A parameter that checkpoints may store in parts: (name, rows) in the order we hold them."""

    parts: tuple[tuple[str, int], ...]
    head_size: int = 0  # query, key and value parts: rows per head


Merges = dict[str, Merge]


def nested(prefix: str, part: HasParameters | None) -> Shapes:
    """The parameters of a part under its name within the whole; none for an absent part."""
    return {} if part is None else {f"{prefix}.{name}": shape for name, shape in part.parameters().items()}


def matrix(name: str, num_out: int, num_in: int, bias: bool = False) -> Shapes:
    """A weight [out, in] and, where there is one, its bias [out]."""
    shapes: Shapes = {f"{name}.weight": (num_out, num_in)}
    if bias:
        shapes[f"{name}.bias"] = (num_out,)
    return shapes


def united(shapes: Iterable[Shapes]) -> Shapes:
    return {name: shape for part in shapes for name, shape in part.items()}


@dataclass(frozen=True)
class RmsNorm:
    size: int
    eps: float

    def parameters(self) -> Shapes:
        return {"weight": (self.size,)}


@dataclass(frozen=True)
class LayerNorm:
    size: int
    eps: float
    bias: bool = True

    def parameters(self) -> Shapes:
        return {name: (self.size,) for name in (("weight", "bias") if self.bias else ("weight",))}


Norm = RmsNorm | LayerNorm


@dataclass(frozen=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int  # positions of pretraining


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


@dataclass(frozen=True)
class Attention:
    """Causal attention over the paged cache."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    rope: Rope | None = None
    window: int = 0  # a query at p sees p-window+1 … p; 0 sees everything before it
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
        return united(
            [
                matrix("qkv", q + k + v, self.width, self.qkv_bias),
                matrix("out", self.width, q, self.out_bias),
                nested("q_norm", self.q_norm),
                nested("k_norm", self.k_norm),
            ]
        )

    def merges(self) -> Merges:
        return {"qkv": Merge(tuple(zip("qkv", self.rows)), self.head_size)}

    def state(self, max_model_len: int, layout: KvLayout) -> StateSpec:
        position_bytes = layout.position_bytes(self.num_kv_heads, self.head_size)
        if 0 < self.window < max_model_len:
            return StateSpec("window", position_bytes, self.window)
        return StateSpec("full", position_bytes)


@dataclass(frozen=True)
class EncoderAttention:
    """Bidirectional attention within a sequence; nothing is remembered."""

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

    def state(self, max_model_len: int, layout: KvLayout) -> None:
        return None


@dataclass(frozen=True)
class Mlp:
    """down(activation(up(x)))"""

    width: int
    hidden: int
    activation: str
    bias: bool = False

    def parameters(self) -> Shapes:
        return matrix("up", self.hidden, self.width, self.bias) | matrix("down", self.width, self.hidden, self.bias)

    def merges(self) -> Merges:
        return {}


@dataclass(frozen=True)
class GatedMlp:
    """down(activation(gate(x)) · up(x))"""

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
