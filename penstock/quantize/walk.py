"""Run a model's stack over a text, one block in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock import layers
from penstock.cache.group import LAYOUTS, group_layers
from penstock.errors import InvalidModel
from penstock.models.decoder import Build, dense
from penstock.models.experts import Experts
from penstock.models.files.checkpoint import Checkpoint
from penstock.models.latent import LatentAttentionSpec
from penstock.models.layer import Attention, GatedMlp, Mlp
from penstock.models.load import match
from penstock.models.memory import Memory
from penstock.models.reading import Sources, from_checkpoint
from penstock.models.spec import ModelSpec, parts_of, spec_from_config
from penstock.ops import OpTable
from penstock.quant.scheme import Scheme
from penstock.runner.memory import BlockMemory
from penstock.runner.step import Step

BLOCK_SIZE = 16
TOKENS_AT_ONCE = 2048
QUANTIZED = (Attention, LatentAttentionSpec, Mlp, GatedMlp, Experts)
Params = dict[str, Tensor]  # a layer's parameters by their names within it
Wrap = Callable[[str, Scheme], Scheme]  # a linear's name and its scheme → the scheme to use


def split_windows(tokens: Sequence[int], window: int) -> list[list[int]]:
    """Cut tokens into windows; a rest shorter than half of one is left out."""
    cut = [list(tokens[first : first + window]) for first in range(0, len(tokens), window)]
    if len(cut) > 1 and len(cut[-1]) < window // 2:
        cut.pop()
    return cut


class Walk:
    """Windows of tokens, and the tensors that a block needs to run on them."""

    def __init__(self, windows: Sequence[Sequence[int]]) -> None:
        self.windows = [list(window) for window in windows]
        self.lengths = [len(window) for window in self.windows]
        self.parts: list[list[int]] = []  # windows that run together
        held = TOKENS_AT_ONCE
        for index, length in enumerate(self.lengths):
            if held + length > TOKENS_AT_ONCE:
                self.parts.append([])
                held = 0
            self.parts[-1].append(index)
            held += length
        self._memories: dict[Any, tuple[list[Any], int]] = {}

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def embed(self, embedding: layers.Embedding) -> Tensor:
        """Look the tokens up → x[T, C]."""
        return torch.cat([embedding(self._step(part)) for part in self.parts])

    def run(self, block: layers.AnyBlock, memory: Memory | None, x: Tensor) -> Tensor:
        """Run a block over all windows: x[T, C] → [T, C]."""
        done, first = [], 0
        for part in self.parts:
            count = sum(self.lengths[index] for index in part)
            done.append(block(x[first : first + count], self._step(part), self._view(memory)))
            first += count
        return torch.cat(done)

    def _blocks_each(self) -> int:
        return -(-max(self.lengths) // BLOCK_SIZE)

    def _step(self, part: list[int]) -> Step:
        lengths = torch.tensor([self.lengths[index] for index in part], dtype=torch.int32)
        positions = torch.cat([torch.arange(int(length)) for length in lengths])
        ids = torch.tensor([token for index in part for token in self.windows[index]])
        each = self._blocks_each()
        table = torch.arange(len(part) * each, dtype=torch.int32).view(len(part), each)
        owners = torch.repeat_interleave(torch.arange(len(part)), lengths.long())
        slots = (owners * each + positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
        return Step(ids, positions, [slots], [table], starts, lengths)

    def _view(self, memory: Memory | None) -> Any:
        if memory is None:
            return None
        if memory not in self._memories:
            grouping = group_layers([memory.state(LAYOUTS["float32"])], BLOCK_SIZE)
            count = max(map(len, self.parts)) * self._blocks_each()
            views = BlockMemory(count, BLOCK_SIZE, grouping, "float32").views([memory])
            self._memories[memory] = views, count
        return self._memories[memory][0][0]


class LayerStack:
    """A checkpoint's parameters as float32, a layer at a time."""

    def __init__(self, checkpoint: Checkpoint, max_model_len: int) -> None:
        self.checkpoint = checkpoint
        whole = spec_from_config(checkpoint.config)
        self.spec: ModelSpec = spec_from_config(checkpoint.config, min(max_model_len, whole.max_positions))
        _check_layers(self.spec, checkpoint)
        self.sources: Sources = match(checkpoint, self.spec)
        self.take = from_checkpoint(checkpoint, self.sources, torch.float32)
        self.ops = OpTable("cpu")
        self.ropes: dict[Any, Any] = {}

    def params(self, index: int) -> Params:
        """Read a layer's parameters."""
        prefix = f"layers.{index}."
        names = [name for name in self.sources if name.startswith(prefix)]
        return {name[len(prefix) :]: self.take(name).float() for name in names}

    def outer(self) -> list[str]:
        """Name the parameters outside of layers."""
        return [name for name in self.sources if not name.startswith("layers.")]

    def count_matrices(self, index: int) -> dict[str, int]:
        """Count the matrices of each stack of a layer: one for each expert."""
        merges = {
            f"{part.prefix}.{name}": merge.num_matrices
            for part in parts_of(self.spec.layers[index])
            for name, merge in part.merges().items()
        }
        return {name: count for name, count in merges.items() if count > 1}

    def block(self, index: int, params: Mapping[str, Tensor], wrap: Wrap | None = None) -> layers.AnyBlock:
        """Build a layer of these parameters."""
        prefix = f"layers.{index}."

        def hold(name: str, bias: Tensor | None) -> Scheme:
            inner = name.removeprefix(prefix)
            scheme = dense(self.ops, params[inner], bias)
            return wrap(inner.removesuffix(".weight"), scheme) if wrap else scheme

        return self._build(lambda name: params[name.removeprefix(prefix)], hold).block(
            prefix[:-1], self.spec.layers[index]
        )

    def _build(self, take: Callable[[str], Tensor], hold: Callable[[str, Tensor | None], Scheme]) -> Build:
        build = Build(self.spec, self.ops, take, hold)
        build.ropes = self.ropes
        return build

    def ends(self) -> tuple[layers.Embedding, layers.Norm | None, layers.Head]:
        """Build what lies before and after the layers."""
        build = self._build(self.take, lambda name, bias: dense(self.ops, self.take(name), bias))
        embedding = build.embedding(self.spec.embedding)
        assert self.spec.head is not None
        return embedding, build.optional("norm", self.spec.norm), build.head(self.spec.head, embedding)

    def memory(self, index: int) -> Memory | None:
        return self.spec.memories()[index]


def _check_layers(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    if spec.is_encoder:
        raise InvalidModel(f"{checkpoint.path}: {spec.architecture} makes embeddings; only text generation is measured")
    for layer in spec.layers:
        for part in (layer.mixer, layer.ffn):
            if part is not None and not isinstance(part, QUANTIZED):
                raise InvalidModel(
                    f"{checkpoint.path}: {spec.architecture} has layers of kind {type(part).__name__}, which are not "
                    "quantized or compared yet; attention with feed-forward networks or experts is"
                )
