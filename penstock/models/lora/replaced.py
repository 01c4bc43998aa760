"""Replace what is the base's by an adapter's own: DoRA's lengths, trained biases, embeddings and heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import InvalidModel
from penstock.models.files.json_file import quote_name
from penstock.models.lora.config import MERGE, LoraConfig
from penstock.models.lora.extras import Extra
from penstock.models.lora.packing import Adapter, TrainedProduct, pack
from penstock.models.lora.places import EMBEDDING, HEAD, Find, LoraPlace
from penstock.models.reading import ungroup
from penstock.ops import Shift, Whole
from penstock.quant.scheme import Scheme

Bases = Mapping[str, Scheme]  # a model's own weights, by its linears' names
ROWS = 4096  # of a weight that are widened at a time


@dataclass(frozen=True)
class Replacements:
    """Trained lengths and biases of modules' outputs [O], by the modules' names, and whole matrices by linears."""

    lengths: dict[str, Tensor]
    biases: dict[str, Tensor]
    wholes: dict[str, Tensor]


class Replacer:
    """Adds to an adapter what it replaces of a model."""

    def __init__(self, path: Path, config: LoraConfig, find: Find, bases: Bases) -> None:
        self.path, self.config, self.find, self.bases = path, config, find, bases

    def sort(self, extras: Mapping[Extra, Tensor]) -> Replacements:
        """Tell extras apart; refuse what cannot be computed beside the model."""
        found = Replacements({}, {}, {})
        for extra, tensor in extras.items():
            module, _, kind = extra.name.rpartition(".")
            place = self.find(module)
            if extra.kind == "magnitude" and place is not None and place.linear != EMBEDDING and not place.heads:
                found.lengths[module] = self._check(extra.name, tensor.flatten(), (place.num_out,))
            elif kind == "bias" and place is not None and self._find_bias(place) is not None:
                found.biases[module] = self._check(extra.name, tensor, (place.num_out,))
            elif kind == "weight" and place is not None and place.linear in (EMBEDDING, HEAD) and self._names(module):
                shape = place.num_out, place.num_in
                wanted = shape[::-1] if place.linear == EMBEDDING else shape
                found.wholes[place.linear] = self._check(extra.name, tensor, wanted)
            else:
                raise InvalidModel(
                    f"{self.path}: tensor {quote_name(extra.name)} of shape {list(tensor.shape)} is no part of a "
                    f"low-rank product, and no bias, embedding or head of this model: {MERGE}"
                )
        return found

    def _names(self, module: str) -> bool:
        return any(module == name or module.endswith(f".{name}") for name in self.config.wholes)

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tensor.shape != shape:
            raise InvalidModel(
                f"{self.path}: what is for {quote_name(name)} has shape {list(tensor.shape)}, and this model takes "
                f"{list(shape)}: the adapter is of another model, or has added tokens, which can be merged alone"
            )
        return tensor

    def _find_bias(self, place: LoraPlace) -> Tensor | None:
        """Return the base's bias of a module's outputs, if biases of such modules can be trained."""
        base: Any = self.bases.get(place.linear)
        bias: Tensor | None = getattr(base, "bias", None)
        if bias is None or not self.config.has_biases or place.linear == HEAD or place.per_matrix:
            return None
        return bias[place.first : place.first + place.num_out]

    def add(
        self,
        adapter: Adapter,
        products: Mapping[str, TrainedProduct],
        places: Mapping[str, LoraPlace],
        by: Replacements,
    ) -> None:
        """Add modules with their products, and what replaces more than them."""
        if self.config.has_magnitudes and by.lengths.keys() != products.keys():
            raise InvalidModel(f"{self.path}: use_dora, but not each module has a magnitude: fetch the adapter again")
        for linear, weight in by.wholes.items():
            if any(place.linear == linear for place in places.values()):
                raise InvalidModel(f"{self.path}: {linear} is replaced and added to at once: fetch the adapter again")
            is_embedding = linear == EMBEDDING
            num_out = weight.shape[1 if is_embedding else 0]
            adapter.add(linear, Shift(0, torch.full((num_out,), -1.0), torch.zeros(num_out)))
            adapter.add(linear, Whole.pack(weight, is_embedding))
        for module in dict.fromkeys((*products, *by.biases)):
            place = places.get(module) or self.find(module)
            assert place is not None
            self._add_module(adapter, module, place, (products.get(module), by))

    def _add_module(
        self, adapter: Adapter, module: str, place: LoraPlace, trained: tuple[TrainedProduct | None, Replacements]
    ) -> None:
        product, by = trained
        length, bias = by.lengths.get(module), by.biases.get(module)
        gain = torch.zeros(place.num_out)
        if product is not None and length is not None:
            gain = self._measure(place, product, length)
            product = TrainedProduct(product.a, product.b.float() * (1 + gain)[:, None], product.scale)
        for linear, part in () if product is None else pack(place, product):
            adapter.add(linear, part)
        if length is None and bias is None:
            return
        before = self._find_own_bias(place)
        after = before if bias is None else bias.float()
        offset = _order(place, after) - before if bias is not None else torch.zeros_like(before)
        gain = _order(place, gain)
        adapter.add(place.linear, Shift(place.first, gain, offset - gain * before, place.matrix))

    def _find_own_bias(self, place: LoraPlace) -> Tensor:
        """Return what the base's product has added already, in the model's order."""
        bias: Tensor | None = getattr(self.bases[place.linear], "bias", None)
        first = place.matrix * place.per_matrix + place.first
        return torch.zeros(place.num_out) if bias is None else bias[first : first + place.num_out]

    def _measure(self, place: LoraPlace, product: TrainedProduct, length: Tensor) -> Tensor:
        """Return length / |row of weight + scale · b · a| - 1 of each output, in the checkpoint's order."""
        b = product.b.float() if place.group is None else ungroup(product.b.float(), *place.group)
        base, first, found = self.bases[place.linear], place.rows.start, torch.empty(place.num_out)
        for begin in range(0, place.num_out, ROWS):
            rows = slice(begin, min(begin + ROWS, place.num_out))
            moved = base.rows(torch.arange(first + rows.start, first + rows.stop)).float()
            moved = moved + product.scale * (b[rows] @ product.a.float())
            found[rows] = torch.linalg.vector_norm(moved, dim=1)
        ordered = _order(place, length.float()) / found - 1
        return ordered if place.group is None else _reorder(place, ordered)


def _order(place: LoraPlace, values: Tensor) -> Tensor:
    """Put a module's outputs [O] in the model's order."""
    return values if place.group is None else ungroup(values, *place.group)


def _reorder(place: LoraPlace, values: Tensor) -> Tensor:
    """Put a module's outputs back into the checkpoint's order."""
    found = torch.empty_like(values)
    found[_order(place, torch.arange(len(values)))] = values
    return found
