"""A whole model as data: what a family makes of a config, and all that loading and the engine need to know."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from penstock.cache.state import StateSpec
from penstock.models.layer import Attention, Embedding, Head, Layer, Merges, Norm, Shapes, nested
from penstock.models.names import Names


@dataclass(frozen=True)
class ModelSpec:
    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: Norm | None                  # after the last layer
    head: Head | None                  # None: an encoder, whose hidden states are pooled
    names: Names                       # how checkpoints spell the parameters
    max_positions: int                 # the context the model was made for
    max_model_len: int                 # the longest sequence this spec was resolved for
    architecture: str = ""
    init_std: float = 0.02             # of dummy weights

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
        return self.states_of(itemsize=4)

    def states_of(self, itemsize: int) -> list[StateSpec | None]:
        """What each layer keeps when a key or value element takes `itemsize` bytes."""
        return [layer.attention.state(self.max_model_len, itemsize) for layer in self.layers]

    def kv_shapes(self) -> list[tuple[int, int] | None]:
        """Per layer (K, D) of its cache; None where there is none."""
        return [(layer.attention.num_kv_heads, layer.attention.head_size)
                if isinstance(layer.attention, Attention) else None for layer in self.layers]

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
