"""Collect a model's tensors under GGUF's names, and write the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import InvalidModel
from penstock.models.files.checkpoint import Checkpoint
from penstock.models.files.gguf_checkpoint import GgufCheckpoint
from penstock.models.files.gguf_names import find_names
from penstock.models.files.write_gguf import GgufTensor, write_gguf
from penstock.models.layer import Attention
from penstock.quant.gguf import GGML_TYPES
from penstock.quantize.block import Pieces, RoundedBlock, TensorRows
from penstock.quantize.gguf.blocks import TYPES, encode
from penstock.quantize.gguf.metadata import (
    QUANTIZATION_VERSION,
    REPLACED,
    Planned,
    check_description,
    find_architecture,
    make_metadata,
    rope_factors,
)
from penstock.quantize.gguf.mixes import MIXES, Model, choose_type
from penstock.quantize.gguf.places import Places, TensorPlace
from penstock.quantize.job import Job
from penstock.quantize.targets import Target
from penstock.quantize.walk import LayerStack

Tensors = dict[str, Tensor]


class GgufOutput:
    """Names, types and row orders of a GGUF file, and its metadata."""

    def __init__(self, stack: LayerStack, target: Target, dtype: torch.dtype, sample: str) -> None:
        self.stack, self.target = stack, target
        checkpoint = stack.checkpoint
        self.architecture = find_architecture(checkpoint, stack.spec)
        two_norms = any(".ln_mlp." in name for name in checkpoint.names())
        self.spelling = find_names(self.architecture, two_norms)
        self.places = Places(self.spelling, stack.spec.names, stack.spec.merges(), stack.sources)
        self.pairs = checkpoint.pairs if isinstance(checkpoint, GgufCheckpoint) else {}
        mixer = stack.spec.layers[0].mixer
        queries = mixer.num_heads // mixer.num_kv_heads if isinstance(mixer, Attention) else 1
        has_output = stack.spec.head is not None and not stack.spec.head.tied
        self.model = Model(self.architecture, stack.spec.num_layers, queries, has_output)
        self.kept: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.factors = rope_factors(stack.spec, checkpoint.config) if checkpoint.metadata is None else {}
        shapes = {
            place.name: place.shape
            for parameter in stack.sources
            if not self._find_pair(parameter)
            for place in self.places.find(parameter)
        }
        self.metadata = self._describe(checkpoint, shapes, sample)

    def _describe(self, checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], sample: str) -> dict[str, Any]:
        spec, path = self.stack.spec, checkpoint.path
        if isinstance(checkpoint, GgufCheckpoint):
            first = checkpoint.file.parts[0]
            found: dict[str, Any] = {
                key: first.stored_value(key)
                for key in first.metadata
                if key not in REPLACED and not key.startswith("split.")
            }
        else:
            from penstock.text.tokenizers.write_gguf import describe_tokenizer

            found = make_metadata(spec, checkpoint.config, path.resolve().name)
            shapes = shapes | {name: factors.shape for name, factors in self.factors.items()}
            check_description(spec, Planned(found, shapes, self.factors), checkpoint)
            found |= describe_tokenizer(path, spec.vocab_size, self.architecture, sample)
        found["general.file_type"] = MIXES[self.target.mix][1]
        found["general.quantization_version"] = QUANTIZATION_VERSION
        return found

    def _type(self, name: str, shape: tuple[int, ...]) -> str:
        return choose_type(self.target.mix, name, shape, self.model)

    def pieces(self) -> Pieces:
        """Say for every matrix of a layer which rows become which tensor, and its type."""
        found: Pieces = {}
        for parameter in self.stack.sources:
            if not parameter.startswith("layers."):
                continue
            if self._find_pair(parameter) or len(self.stack.sources[parameter][0].shape) < 2:
                continue
            for place in self.places.find(parameter):
                kind = self._type(place.name, place.shape)
                found.setdefault(parameter, []).append(TensorRows(place.name, place.rows, kind))
        return found

    def _find_pair(self, parameter: str) -> tuple[str, str] | None:
        """Return the two tensors that a GGUF source holds in place of a joint matrix; they stay as they are."""
        return self.pairs.get(self.stack.sources[parameter][0].tensor)

    def _order(self, place: TensorPlace) -> Tensor | None:
        """Return for each row of the file its row of the parameter."""
        module = place.name.rpartition(".")[0].rpartition(".")[2]
        if module not in self.spelling.rotated:
            return None
        mixer = self.stack.spec.layers[0].mixer
        assert isinstance(mixer, Attention)
        heads = mixer.num_heads if module == "attn_q" else mixer.num_kv_heads
        return torch.arange(place.shape[0]).view(heads, 2, -1).transpose(1, 2).flatten()

    def layer(self, index: int, block: RoundedBlock) -> Tensors:
        made: Tensors = {}
        for inner, value in block.params.items():
            parameter = f"layers.{index}.{inner}"
            pair = self._find_pair(parameter)
            if pair:
                self._copy_pair(pair, made)
                continue
            for place in self.places.find(parameter):
                order = self._order(place)
                rounded = block.matrices.get(f"{parameter}/{place.name}")
                if rounded is not None and rounded.raw is not None:
                    raw, kind = rounded.raw, self._type(place.name, place.shape)
                else:
                    each = value.view(place.num_matrices, -1, *value.shape[1:])[:, place.rows]
                    raw, kind = _floats(each.flatten(0, 1)), "F32"
                made[place.name] = raw if order is None else raw[order]
                self.kept[place.name] = kind, place.shape
        return made

    def _copy_pair(self, pair: tuple[str, str], made: Tensors) -> None:
        checkpoint = self.stack.checkpoint
        assert isinstance(checkpoint, GgufCheckpoint)
        for name in pair:
            info = checkpoint.origins[name][1]
            made[info.name] = torch.from_numpy(checkpoint.file.raw(info).copy())
            self.kept[info.name] = GGML_TYPES[info.ggml_type].name, info.shape

    def outer(self) -> Tensors:
        made: Tensors = {}
        for parameter in self.stack.outer():
            value = self.stack.take(parameter).float()
            for place in self.places.find(parameter):
                kind = self._type(place.name, place.shape)
                part = value[place.rows]
                made[place.name] = torch.from_numpy(encode(part, kind)) if part.ndim == 2 else _floats(part)
                self.kept[place.name] = kind, place.shape
        for name, factors in self.factors.items():
            made[name] = _floats(torch.from_numpy(factors))
            self.kept[name] = "F32", tuple(factors.shape)
        if isinstance(self.stack.checkpoint, GgufCheckpoint):
            self._copy_factors(self.stack.checkpoint, made)
        return made

    def _copy_factors(self, checkpoint: GgufCheckpoint, made: Tensors) -> None:
        """Copy tensors that only the config needs."""
        known = {info.name for _, info in checkpoint.origins.values()}
        for name, info in checkpoint.file.tensors.items():
            if name not in known and info.ggml_type == 0:
                made[name] = torch.from_numpy(checkpoint.file.raw(info).copy())
                self.kept[name] = "F32", info.shape

    def facts(self, names: Tensors) -> dict[str, Any]:
        """Note types and shapes for a run that goes on later."""
        return {"types": {name: self.kept[name] for name in names}}

    def publish(self, job: Job, num_parts: int) -> None:
        types: dict[str, tuple[int, str, list[int]]] = {}
        for number in range(num_parts):
            for name, (kind, shape) in job.part_facts(number)["types"].items():
                types[name] = number, kind, shape
        tensors = [GgufTensor(name, tuple(shape), TYPES[kind]) for name, (_, kind, shape) in types.items()]
        made = job.folder / "model.unfinished"
        write_gguf(made, self.metadata, tensors, _read(job, [(n, name) for name, (n, _, _) in types.items()]))
        job.publish(made)


def _floats(value: Tensor) -> Tensor:
    """Bytes of float32, one row each, or one number each of a vector."""
    stored = value.float().contiguous()
    return stored.view(torch.uint8).view(len(stored), -1)


def _read(job: Job, places: list[tuple[int, str]]) -> Iterator[np.ndarray]:
    opened, file = -1, None
    for number, name in places:
        if number != opened:
            opened, file = number, job.read(number)
        assert file is not None
        yield file.get_tensor(name).numpy()


def check_path(out: Path) -> None:
    """Refuse a name that readers would not take for a GGUF file."""
    if out.suffix != ".gguf":
        raise InvalidModel(f"{out} is to be a GGUF file: give it a name that ends in .gguf")
