"""A whole model as data: what a registered family makes of a config, and all that loading and the engine need to know.

Parameters are named after the part they belong to: `attention.qkv`, `attention_norm`, `mlp.down`, `mlp_out_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, ClassVar, Protocol

from penstock.cache.group import LAYOUTS, KvLayout, StateSpec
from penstock.errors import InvalidModel
from penstock.models.config import Config
from penstock.models.cut import Cuts
from penstock.models.layer import Ffn, Merges, Mixer, Norm, Part, Shapes, add_prefix, matrix, unite
from penstock.models.memory import KvMemory, LatentMemory, Memory
from penstock.models.multimodal import NAMES as MULTIMODAL_NAMES
from penstock.models.multimodal import is_multimodal, read_text_config
from penstock.models.names import Names


class AnyBlock(Protocol):
    """Built as the class of `penstock.layers` that has its name, which takes the fields by theirs."""

    @property
    def mixer(self) -> Mixer: ...
    @property
    def ffn(self) -> Ffn | None: ...

    def parameters(self) -> Shapes: ...


def parts_of(block: AnyBlock) -> list[Part]:
    """The mixer, and the FFN if there is one."""
    return [block.mixer] if block.ffn is None else [block.mixer, block.ffn]


def parts(block: AnyBlock) -> Iterator[tuple[str, str, Any]]:
    """Yield field, parameter prefix and value of each part there is."""
    for field in fields(block):  # type: ignore[arg-type]
        value = getattr(block, field.name)
        if hasattr(value, "parameters"):
            half, _, role = field.name.partition("_")
            yield field.name, getattr(block, half).prefix + (role and f"_{role}"), value


class _Parameters:
    def parameters(self: Any) -> Shapes:
        return unite(add_prefix(prefix, part) for _, prefix, part in parts(self))


@dataclass(frozen=True)
class Block(_Parameters):
    mixer: Mixer
    ffn: Ffn
    mixer_norm: Norm
    ffn_norm: Norm


@dataclass(frozen=True)
class MixerBlock(_Parameters):
    ffn: ClassVar[None] = None
    mixer: Mixer
    mixer_norm: Norm


@dataclass(frozen=True)
class ScaledBlock(Block):
    scale: float


@dataclass(frozen=True)
class OutputNormBlock(_Parameters):
    mixer: Mixer
    ffn: Ffn
    mixer_norm: Norm | None
    ffn_norm: Norm | None
    mixer_out_norm: Norm
    ffn_out_norm: Norm


@dataclass(frozen=True)
class ParallelBlock(_Parameters):
    mixer: Mixer
    ffn: Ffn
    mixer_norm: Norm
    ffn_norm: Norm | None = None


@dataclass(frozen=True)
class PostNormBlock(Block):
    """Norms follow the sums."""


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
        return shapes | add_prefix("norm", self.norm)


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
    cpu_only: str = ""  # what a GPU lacks for this model, and the remedy
    cuts: Cuts | None = None  # one rank's part of a model; layers then describe its heads and experts alone
    cache_dtypes: tuple[str, ...] = ()  # of each layer's keys and values; empty: the cache's
    stage: range | None = None  # of a pipeline: layers that are loaded; the first embeds, the last has the head

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
    def is_first(self) -> bool:
        """True unless it is a later pipeline stage, which gets hidden states."""
        return self.stage is None or self.stage.start == 0

    @property
    def is_last(self) -> bool:
        """True unless it is an earlier pipeline stage, which gives hidden states."""
        return self.stage is None or self.stage.stop == self.num_layers

    def cut(self) -> ModelSpec:
        """Return the spec of the stage's layers alone, beside embedding and head."""
        if self.stage is None:
            return self
        own = slice(self.stage.start, self.stage.stop)
        return replace(self, layers=self.layers[own], cache_dtypes=self.cache_dtypes[own], stage=None)

    def holds(self, parameter: str) -> bool:
        """Return True if the stage has the parameter."""
        part, _, rest = parameter.partition(".")
        if part == "layers":
            return self.stage is None or int(rest.partition(".")[0]) in self.stage
        if part != "embedding":
            return self.is_last
        is_head = self.head is not None and self.head.tied and rest.startswith("tokens.")
        return self.is_first or self.is_last and is_head

    def memories(self) -> list[Memory | None]:
        """List what each layer keeps between steps; None where it keeps nothing."""
        found = [layer.mixer.memory(self.max_model_len) for layer in self.layers]
        return [
            replace(memory, dtype=dtype) if dtype and isinstance(memory, KvMemory | LatentMemory) else memory
            for memory, dtype in zip(found, self.cache_dtypes or [""] * len(found))
        ]

    def states(self, layout: KvLayout = LAYOUTS["float32"]) -> list[StateSpec | None]:
        """Describe each layer's memory to the cache when keys and values are stored like `layout`."""
        return [memory.state(layout) if memory else None for memory in self.memories()]

    def parameters(self) -> Shapes:
        """Every parameter under our name, in the order a step needs them."""
        if self.cuts is not None:
            return self.cuts.shapes()
        shapes = add_prefix("embedding", self.embedding)
        for index, layer in enumerate(self.layers):
            shapes |= add_prefix(f"layers.{index}", layer)
        return shapes | add_prefix("norm", self.norm) | add_prefix("head", self.head)

    def merges(self) -> Merges:
        """The parameters that checkpoints may store in parts."""
        merges: Merges = {}
        for index, layer in enumerate(self.layers):
            for part in parts_of(layer):
                merges |= {f"layers.{index}.{part.prefix}.{name}": merge for name, merge in part.merges().items()}
        return merges

    def scratch_bytes(self, itemsize: int) -> int:
        """Bytes per token of a step's values in the widest layer, beside as much again and some more."""
        widest = max((sum(part.scratch_values() for part in parts_of(layer)) for layer in self.layers), default=0)
        return itemsize * (2 * widest + 6 * self.width)

    @property
    def num_parameters(self) -> int:
        return sum(prod(shape) for shape in self.parameters().values())


QUANTIZATION_KEYS = ("quantization_config", "compression_config")

Read = Callable[[Config], ModelSpec]


@dataclass(frozen=True)
class Family:
    """A model family."""

    architecture: str
    read: Read
    like: tuple[Mapping[str, Any], ...]  # tiny configs that together cover every branch of `read`
    cpu_only: str = ""  # as in ModelSpec


FAMILIES: dict[str, Family] = {}
ALIASES = {"PhiMoEForCausalLM": "PhimoeForCausalLM"}  # the class in a checkpoint's own code → transformers' name of it


def family(
    architecture: str, *, like: Mapping[str, Any] | Sequence[Mapping[str, Any]], cpu_only: str = ""
) -> Callable[[Read], Read]:
    """Register a function under the architecture name of config.json."""
    configs = (like,) if isinstance(like, Mapping) else tuple(like)
    if not configs or not all(configs):
        raise ValueError(f"family {architecture} has no tiny config to test it with: pass like=")
    if architecture in FAMILIES:
        raise ValueError(f"family {architecture} is registered already")

    def register(read: Read) -> Read:
        FAMILIES[architecture] = Family(architecture, read, configs, cpu_only)
        return read

    return register


def find_family(config: Mapping[str, Any]) -> Family:
    if not isinstance(config, Mapping):
        raise InvalidModel("config.json must hold a JSON object")
    named = config.get("architectures")
    if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
        raise InvalidModel(f"config key architectures={str(named)[:80]!r} must be a list that names the model's class")
    for name in named:
        architecture = ALIASES.get(name) or name
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    known = ", ".join(sorted(FAMILIES))
    raise InvalidModel(f"unknown architecture {', '.join(named)[:200]}: the known ones are {known}")


def spec_from_config(config: Mapping[str, Any], max_model_len: int | None = None) -> ModelSpec:
    """Build the spec for sequences of up to `max_model_len` (default: the model's context length)."""
    if is_multimodal(config):
        spec = spec_from_config(read_text_config(config), max_model_len)
        return replace(spec, names=spec.names | MULTIMODAL_NAMES)
    found = find_family(config)
    reader = Config(config, max_model_len)
    reader.only("is_encoder_decoder", False)
    reader.ignore(*QUANTIZATION_KEYS)  # which the checkpoint reads
    spec = found.read(reader)
    reader.finish()
    return replace(spec, architecture=found.architecture, cpu_only=found.cpu_only)
