"""Find the place of each of an adapter's modules, and check its tensors against it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import InvalidModel
from penstock.models.files.json_file import quote_name
from penstock.models.files.safetensors import TensorEntry
from penstock.models.lora.config import LoraConfig
from penstock.models.lora.places import Find, LoraPlace
from penstock.models.spec import ModelSpec

MAX_FACTOR = 1e35  # times a request's scale it is still a float32


@dataclass(frozen=True)
class Locator:
    path: Path
    config: LoraConfig
    spec: ModelSpec
    find: Find
    find_stacks: Callable[[str], Iterable[LoraPlace]]

    def locate(self, module: str, pair: tuple[str, str], entries: Mapping[str, TensorEntry]) -> LoraPlace:
        """Find a module's place and check the tensors a and b against it."""
        a, b = (entries[name].shape for name in pair)
        place = self.find(module) or self._choose_stack(module, pair, (a, b))
        if place is None:
            raise InvalidModel(
                f"{self.path}: tensor {quote_name(pair[0])} belongs to no linear of this {self.spec.architecture} that "
                "may have an adapter: it is of another model, or of experts, positions or kv_b_proj; on a GPU and with "
                "ranks these can be merged alone"
            )
        named = place.parameter or module
        is_wanted = self.config.targets_parameter(place.parameter) if place.parameter else self._targets(module)
        if not is_wanted:
            raise InvalidModel(
                f"{self.path}: tensor {quote_name(pair[0])} is of a module that target_modules does not name: config "
                "and tensors do not belong together"
            )
        rank, factor = self.config.find_rank(named), self.config.find_scale(named)
        if abs(factor) > MAX_FACTOR:
            raise InvalidModel(
                f"{self.path}: lora_alpha / r of {quote_name(module)} is {factor:g}, over {MAX_FACTOR:.3g}: "
                "correct lora_alpha or alpha_pattern"
            )
        ranks = rank * place.stack
        for name, expected in zip(pair, ((ranks, place.num_in), (place.num_out, ranks))):
            if entries[name].shape != expected:
                raise InvalidModel(
                    f"{self.path}: tensor {quote_name(name)} has shape {list(entries[name].shape)}, this model and "
                    f"rank {rank} take {list(expected)}: the adapter is of another model"
                )
        return place

    def _choose_stack(
        self, module: str, pair: tuple[str, str], shapes: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> LoraPlace | None:
        """Tell the stacks of a module of experts apart, which PEFT names alike, by shapes."""
        (_, num_in), (num_out, _) = shapes
        stacks = list(self.find_stacks(module))
        for place in stacks:
            if (place.num_in, place.num_out) == (num_in, num_out):
                if num_in == num_out and not self.config.swaps_stacks:
                    raise InvalidModel(
                        f"{self.path}: tensor {quote_name(pair[0])} is of a square stack, whose inputs peft took "
                        "for outputs before 0.19: save the adapter with a newer one"
                    )
                return place
        if stacks:
            raise InvalidModel(
                f"{self.path}: tensor {quote_name(pair[0])} has inputs and outputs {[num_in, num_out]}, and the stacks "
                f"of this model's experts {[[each.num_in, each.num_out] for each in stacks]}: the adapter is of "
                "another model, or was saved by a peft before 0.19"
            )
        return None

    def _targets(self, module: str) -> bool:
        return self.config.targets_module(module, _find_layer(module))

    def check_layers(self, pairs: Mapping[str, tuple[str, str]]) -> None:
        """Require that a module adapted in one layer is adapted in every layer that the config names."""
        for module in {re.sub(r"\.\d{1,6}\.", ".*.", name, count=1) for name in pairs}:
            for wanted in self._list_layers(module):
                targeted = self.config.targets == "all-linear" or self._targets(wanted)
                if targeted and wanted not in pairs:
                    raise InvalidModel(
                        f"{self.path}: tensors of {quote_name(wanted)} are missing, which target_modules names: "
                        "fetch the adapter again"
                    )

    def _list_layers(self, module: str) -> Iterator[str]:
        """Name the module in every layer that has it."""
        for index in range(self.spec.num_layers if "*" in module else 0):
            wanted = module.replace("*", str(index), 1)
            if self.find(wanted) is not None:
                yield wanted

    def check_stacks(self, places: Mapping[str, LoraPlace]) -> None:
        """Require that a stack adapted in one layer is adapted in every layer."""
        found = {place.parameter for place in places.values() if place.parameter}
        for one in {re.sub(r"\.\d{1,6}\.", ".*.", name, count=1) for name in found}:
            module = one.rpartition(".")[0]
            for index in range(self.spec.num_layers):
                for place in self.find_stacks(module.replace("*", str(index), 1)):
                    if place.parameter == one.replace("*", str(index), 1) and place.parameter not in found:
                        raise InvalidModel(
                            f"{self.path}: tensors of {quote_name(place.parameter)} are missing, which "
                            "target_parameters names: fetch the adapter again"
                        )


def _find_layer(module: str) -> int | None:
    inside = re.search(r"\.(\d{1,6})\.", module)
    return int(inside[1]) if inside else None
