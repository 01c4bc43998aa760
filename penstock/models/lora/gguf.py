"""Adapters that llama.cpp's converter wrote: one GGUF file with pairs of tensors by the model's GGUF names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import InvalidModel, quote
from penstock.models.files.gguf import GgufFile, TensorInfo
from penstock.models.files.gguf_checkpoint import DENSE
from penstock.models.files.gguf_names import SPELLINGS, Origin, find, find_names
from penstock.models.files.json_file import quote_name
from penstock.models.lora.config import LoraConfig
from penstock.models.lora.extras import Extra
from penstock.models.lora.places import EMBEDDING, Find, LoraPlace, require_finite
from penstock.models.spec import ModelSpec
from penstock.quant.gguf import dequantize

END = re.compile(r"(.+\.weight)\.lora_([ab])")
KIND = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|Model)$")
# GGUF architectures that stand for several families, or are spelled differently.
FAMILIES = {"llama": ("llama", "mistral", "mixtral"), "deepseek2": ("deepseekv2", "deepseekv3"), "gpt-oss": ("gptoss",)}


@dataclass(frozen=True)
class GgufPair:
    """The tensors of a module, and how the converter changed the order of its outputs."""

    a: TensorInfo
    b: TensorInfo
    origin: Origin


@dataclass(frozen=True)
class CheckedGguf:
    """A GGUF adapter whose names, ranks and shapes fit a model."""

    path: Path
    config: LoraConfig
    pairs: dict[str, GgufPair]
    places: dict[str, LoraPlace]
    rank: int  # the largest
    head_size: int
    extras: dict[str, Extra] = field(default_factory=dict)  # none

    def read_extras(self) -> Iterator[tuple[Extra, Tensor]]:
        return iter(())

    def read(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each module with a [r, in] and b [out, r], with the rows of b as PEFT has them."""
        file = GgufFile(self.path)
        try:
            for module, pair in self.pairs.items():
                a, b = (require_finite(self.path, _read(file, info), info.name) for info in (pair.a, pair.b))
                if _is_embedding(pair.a.name):
                    a = a.t().contiguous()
                yield module, a, self._order(b) if pair.origin.rotated else b
        finally:
            file.close()

    def _order(self, b: Tensor) -> Tensor:
        """Put the two rotary halves of each head one after the other."""
        heads = b.view(-1, self.head_size // 2, 2, b.shape[1])
        return heads.transpose(1, 2).reshape(b.shape)


def check_gguf(path: Path, spec: ModelSpec, max_rank: int, find_place: Find, merges: bool = False) -> CheckedGguf:
    """Check names, ranks and shapes of a GGUF adapter before the first tensor is read."""
    if not path.is_file():
        raise InvalidModel(f"{path} is no file: name a GGUF adapter, or a folder that peft wrote")
    file = GgufFile(path)
    try:
        alpha = _read_alpha(path, file.metadata, spec)
        pairs = _pair(path, file, spec)
    finally:
        file.close()
    places, ranks = {}, {}
    for module, pair in pairs.items():
        if merges and pair.origin.stacked:
            raise InvalidModel(f"{path}: {quote_name(module)} is reordered by the converter: merge the PEFT folder")
        places[module] = _locate(path, module, pair, find_place, spec)
        ranks[module] = pair.b.shape[1]
    rank = max(ranks.values())
    if rank > max_rank:
        raise InvalidModel(f"{path}: rank {rank} is over max_lora_rank={max_rank}: raise --max-lora-rank")
    others = {re.compile(re.escape(module) + "$"): own for module, own in ranks.items() if own != rank}
    alphas = {} if alpha else {pattern: float(own) for pattern, own in others.items()}  # 0 stands for the rank
    config = LoraConfig(rank, alpha or float(rank), False, others, alphas, tuple(pairs), (), None)
    sizes = {merge.head_size for merge in spec.merges().values() if merge.head_size}
    if any(pair.origin.rotated for pair in pairs.values()) and len(sizes) != 1:
        raise InvalidModel(f"{path}: heads of several sizes: give the PEFT folder that the adapter was made from")
    return CheckedGguf(path, config, pairs, places, rank, next(iter(sizes), 0))


def _read_alpha(path: Path, metadata: dict[str, Any], spec: ModelSpec) -> float:
    """Check what the file is and is for; returns lora_alpha."""
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if metadata.get(key) != wanted:
            raise InvalidModel(
                f"{path}: {key} is {quote(metadata.get(key))}, and a LoRA adapter has {wanted!r}: it is another kind "
                "of file"
            )
    architecture = metadata.get("general.architecture")
    family = KIND.sub("", spec.architecture).lower()
    if architecture not in SPELLINGS or family not in FAMILIES.get(architecture, (architecture,)):
        raise InvalidModel(
            f"{path} is for general.architecture={quote(architecture)}, and the model is a {spec.architecture}: "
            "the adapter is of another model"
        )
    if "adapter.alora.invocation_tokens" in metadata:
        raise InvalidModel(f"{path} begins at invocation tokens (aLoRA), which is not supported: train a plain LoRA")
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not abs(alpha) < 1e30:
        raise InvalidModel(f"{path}: adapter.lora.alpha is {quote(alpha)}: it must be a finite number")
    return float(alpha)


def _pair(path: Path, file: GgufFile, spec: ModelSpec) -> dict[str, GgufPair]:
    """Find the tensors of every module, by the module's name in the checkpoint that the model was made from."""
    spelling, found = find_names(file.metadata["general.architecture"], False), dict[str, dict[str, TensorInfo]]()
    for info in file.tensors.values():
        end = END.fullmatch(info.name)
        if end is None or len(info.shape) != 2:
            raise InvalidModel(
                f"{path}: tensor {quote_name(info.name)} of shape {list(info.shape)} is no part of a low-rank product: "
                "give the PEFT folder that the adapter was made from"
            )
        found.setdefault(end[1], {})[end[2]] = info
    pairs = {}
    for name, pair in found.items():
        if len(pair) == 1:
            raise InvalidModel(f"{path}: tensor {quote_name(name)} has a lora_{next(iter(pair))} alone: fetch it again")
        origin = find(spelling, name, spec.num_layers)
        if origin is None:
            raise InvalidModel(f"{path}: tensor {quote_name(name)} is no linear: the adapter is of another model")
        pairs[origin.name.removesuffix(".weight")] = GgufPair(pair["a"], pair["b"], origin)
    return pairs


def _locate(path: Path, module: str, pair: GgufPair, find_place: Find, spec: ModelSpec) -> LoraPlace:
    place = find_place(module)
    if place is None:
        raise InvalidModel(
            f"{path}: tensor {quote_name(pair.a.name)} belongs to no linear of this {spec.architecture} that may have "
            "an adapter: it is of another model, or of experts, positions or kv_b_proj"
        )
    rank = pair.b.shape[1]
    wanted = (place.num_in, rank) if _is_embedding(pair.a.name) else (rank, place.num_in)
    for info, shape in ((pair.a, wanted), (pair.b, (place.num_out, rank))):
        if info.shape != shape:
            raise InvalidModel(
                f"{path}: tensor {quote_name(info.name)} has shape {list(info.shape)}, and this model and rank {rank} "
                f"take {list(shape)}: the adapter is of another model"
            )
    is_regrouped = pair.origin.stacked and place.linear != EMBEDDING
    return LoraPlace(place.linear, place.first, place.num_out, place.num_in) if is_regrouped else place


def _is_embedding(name: str) -> bool:
    return name.startswith("token_embd.")  # its a is stored [in, r]


def _read(file: GgufFile, info: TensorInfo) -> Tensor:
    raw = file.raw(info)
    if info.ggml_type in DENSE:
        return torch.from_numpy(raw.copy()).view(DENSE[info.ggml_type]).reshape(info.shape)
    return torch.from_numpy(dequantize(raw, info.ggml_type, info.shape))
