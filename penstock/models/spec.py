"""A whole model as data: what a family makes of a config, and all that loading and the engine need to know."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from penstock.cache.layout import LAYOUTS, KvLayout
from penstock.cache.state import StateSpec
from penstock.models.block import AnyBlock
from penstock.models.layer import Attention, Merges, Norm, Shapes, matrix, nested
from penstock.models.names import Names


@dataclass(frozen=True)
class Embedding:
    """Token rows, projected where they are narrower than the model, scaled; plus positions and types; normed."""

    vocab_size: int
    width: int
    row_width: int = 0  # 0: as wide as the model
    scale: float = 1.0
    num_positions: int = 0  # rows of a learned position table
    position_offset: int = 0  # the row of position 0
    num_types: int = 0  # token types; every token is of type 0
    norm: Norm | None = None

    @property
    def row(self) -> int:
        return self.row_width or self.width

    def parameters(self) -> Shapes:
        shapes = matrix("tokens", self.vocab_size, self.row)
        if self.row != self.width:
            shapes |= matrix("project", self.width, self.row)
        if self.num_positions:
            shapes |= matrix("positions", self.num_positions, self.width)
        if self.num_types:
            shapes |= matrix("types", self.num_types, self.width)
        return shapes | nested("norm", self.norm)


@dataclass(frozen=True)
class Head:
    """softcap((vocabulary · project(x)) / divisor); a tied head reads the embedding's rows."""

    vocab_size: int
    width: int
    row_width: int = 0  # as in Embedding
    tied: bool = False
    bias: bool = False
    divisor: float = 1.0
    softcap: float = 0.0

    @property
    def row(self) -> int:
        return self.row_width or self.width

    def parameters(self) -> Shapes:
        shapes: Shapes = {} if self.tied else matrix("rows", self.vocab_size, self.row)
        if self.bias:
            shapes["bias"] = (self.vocab_size,)
        if self.row != self.width:
            shapes |= matrix("project", self.row, self.width)
        return shapes


@dataclass(frozen=True)
class ModelSpec:
    embedding: Embedding
    layers: tuple[AnyBlock, ...]
    norm: Norm | None  # after the last layer
    head: Head | None  # None: an encoder, whose hidden states are pooled
    names: Names  # how checkpoints spell the parameters
    max_positions: int  # the context the model was made for
    max_model_len: int  # the longest sequence this spec was resolved for
    architecture: str = ""
    init_std: float = 0.02  # of dummy weights

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    @property
    def width(self) -> int:
        return self.embedding.width

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_encoder(self) -> bool:
        return self.head is None

    @property
    def states(self) -> list[StateSpec | None]:
        """What each layer keeps, with float32 keys and values; None for an encoder's."""
        return self.states_of(LAYOUTS["float32"])

    def states_of(self, layout: KvLayout) -> list[StateSpec | None]:
        """What each layer keeps when keys and values are stored like this."""
        return [layer.attention.state(self.max_model_len, layout) for layer in self.layers]

    def kv_shapes(self) -> list[tuple[int, int] | None]:
        """Per layer (K, D) of its cache; None where there is none."""
        return [
            (layer.attention.num_kv_heads, layer.attention.head_size)
            if isinstance(layer.attention, Attention)
            else None
            for layer in self.layers
        ]

    def parameters(self) -> Shapes:
        """Every parameter under our name, in the order a step needs them."""
        shapes = nested("embedding", self.embedding)
        for index, layer in enumerate(self.layers):
            shapes |= nested(f"layers.{index}", layer)
        return shapes | nested("norm", self.norm) | nested("head", self.head)

    def merges(self) -> Merges:
        """The parameters that checkpoints may store in parts."""
        merges: Merges = {}
        for index, layer in enumerate(self.layers):
            for part in ("attention", "mlp"):
                for name, merge in getattr(layer, part).merges().items():
                    merges[f"layers.{index}.{part}.{name}"] = merge
        return merges

    @property
    def num_parameters(self) -> int:
        return sum(prod(shape) for shape in self.parameters().values())
