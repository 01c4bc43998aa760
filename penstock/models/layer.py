"""What a layer is, as plain data: sizes and constants, the parameters it owns, the state it keeps.

A description holds no tensors and no code that computes; `build.py` turns it into a layer of `penstock.layers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from penstock.cache.state import StateSpec

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


class HasParameters(Protocol):
    def parameters(self) -> Shapes: ...


@dataclass(frozen=True)
class Merge:
    """A parameter that checkpoints may store in parts: (name, rows) in the order we hold them."""

    parts: tuple[tuple[str, int], ...]
    head_size: int = 0             # query, key and value parts: rows per head


Merges = dict[str, Merge]


def nested(prefix: str, part: HasParameters | None) -> Shapes:
    """The parameters of a part under its name within the whole; none for an absent part."""
    return {} if part is None else {f"{prefix}.{name}": shape for name, shape in part.parameters().items()}


def _matrix(name: str, num_out: int, num_in: int, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (num_out, num_in)}
    if bias:
        shapes[f"{name}.bias"] = (num_out,)
    return shapes


def _united(shapes: Iterable[Shapes]) -> Shapes:
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
        return {"weight": (self.size,)} | ({"bias": (self.size,)} if self.bias else {})


Norm = RmsNorm | LayerNorm


@dataclass(frozen=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int                  # positions of pretraining


@dataclass(frozen=True)
class YarnScaling:
    factor: float
    original: int                  # positions of pretraining
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongScaling:
    factors: tuple[float, ...]     # one per frequency, the short or the long list
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
    window: int = 0                # a query at p sees p-window+1 … p; 0 sees everything before it
    softcap: float = 0.0
    alibi: tuple[float, ...] = ()  # slope per head
    qkv_bias: bool = False
    out_bias: bool = False
    q_norm: Norm | None = None     # its size says over what: one head, or all of them together
    k_norm: Norm | None = None

    @property
    def rows(self) -> tuple[int, int, int]:
        """Outputs of the query, key and value projections."""
        return self.num_heads * self.head_size, self.num_kv_heads * self.head_size, self.num_kv_heads * self.head_size

    def parameters(self) -> Shapes:
        q, k, v = self.rows
        return _united([_matrix("qkv", q + k + v, self.width, self.qkv_bias),
                        _matrix("out", self.width, q, self.out_bias),
                        nested("q_norm", self.q_norm), nested("k_norm", self.k_norm)])

    def merges(self) -> Merges:
        return {"qkv": Merge(tuple(zip("qkv", self.rows)), self.head_size)}

    def state(self, max_model_len: int, itemsize: int) -> StateSpec:
        position_bytes = 2 * self.num_kv_heads * self.head_size * itemsize
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
        return _matrix("qkv", 3 * rows, self.width, self.bias) | _matrix("out", self.width, rows, self.bias)

    def merges(self) -> Merges:
        rows = self.num_heads * self.head_size
        return {"qkv": Merge((("q", rows), ("k", rows), ("v", rows)), self.head_size)}

    def state(self, max_model_len: int, itemsize: int) -> None:
        return None


@dataclass(frozen=True)
class Mlp:
    """down(activation(up(x)))"""

    width: int
    hidden: int
    activation: str
    bias: bool = False

    def parameters(self) -> Shapes:
        return _matrix("up", self.hidden, self.width, self.bias) | _matrix("down", self.width, self.hidden, self.bias)

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
        return (_matrix("gate_up", 2 * self.hidden, self.width, self.bias)
                | _matrix("down", self.width, self.hidden, self.bias))

    def merges(self) -> Merges:
        return {"gate_up": Merge((("gate", self.hidden), ("up", self.hidden)))}


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
        return _united(nested(name, getattr(self, name)) for name in names)


@dataclass(frozen=True)
class ParallelBlock:
    """x + attention(norm(x)) + mlp(mlp_norm(x)); without mlp_norm both read the same normed x."""

    attention: Attention
    mlp: Mlp | GatedMlp
    attention_norm: Norm
    mlp_norm: Norm | None = None

    def parameters(self) -> Shapes:
        return _united(nested(name, getattr(self, name)) for name in ("attention_norm", "attention", "mlp_norm", "mlp"))


@dataclass(frozen=True)
class PostNormBlock:
    """norm(x + attention(x)), then mlp_norm(x + mlp(x))."""

    attention: Attention | EncoderAttention
    mlp: Mlp | GatedMlp
    attention_norm: Norm
    mlp_norm: Norm

    def parameters(self) -> Shapes:
        return _united(nested(name, getattr(self, name)) for name in ("attention", "attention_norm", "mlp", "mlp_norm"))


Layer = Block | ParallelBlock | PostNormBlock


@dataclass(frozen=True)
class Embedding:
    """Token rows, projected where they are narrower than the model, scaled; plus positions and types; normed."""

    vocab_size: int
    width: int
    row_width: int = 0             # 0: as wide as the model
    scale: float = 1.0
    num_positions: int = 0         # rows of a learned position table
    position_offset: int = 0       # the row of position 0
    num_types: int = 0             # token types; every token is of type 0
    norm: Norm | None = None

    @property
    def row(self) -> int:
        return self.row_width or self.width

    def parameters(self) -> Shapes:
        shapes = _matrix("tokens", self.vocab_size, self.row)
        if self.row != self.width:
            shapes |= _matrix("project", self.width, self.row)
        if self.num_positions:
            shapes |= _matrix("positions", self.num_positions, self.width)
        if self.num_types:
            shapes |= _matrix("types", self.num_types, self.width)
        return shapes | nested("norm", self.norm)


@dataclass(frozen=True)
class Head:
    """softcap((vocabulary · project(x)) / divisor); a tied head reads the embedding's rows."""

    vocab_size: int
    width: int
    row_width: int = 0             # as in Embedding
    tied: bool = False
    bias: bool = False
    divisor: float = 1.0
    softcap: float = 0.0

    @property
    def row(self) -> int:
        return self.row_width or self.width

    def parameters(self) -> Shapes:
        shapes: Shapes = {} if self.tied else _matrix("rows", self.vocab_size, self.row)
        if self.bias:
            shapes["bias"] = (self.vocab_size,)
        if self.row != self.width:
            shapes |= _matrix("project", self.row, self.width)
        return shapes
