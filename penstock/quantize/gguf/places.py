"""Name a model's parameters as GGUF files do, and say which rows of them make a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import InvalidModel
from penstock.models.files.gguf_names import GgufNames
from penstock.models.layer import Merges
from penstock.models.names import Names
from penstock.models.reading import Source, Sources
from penstock.quantize.layout import cut_rows


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of the file, and its rows of a parameter; of a stack those of each matrix."""

    name: str
    rows: slice
    shape: tuple[int, ...]
    num_matrices: int = 1


class Places:
    """Where parameters of a model lie in a GGUF file."""

    def __init__(self, spelling: GgufNames, names: Names, merges: Merges, sources: Sources) -> None:
        self.spelling, self.names, self.merges, self.sources = spelling, names, merges, sources
        self.layer: dict[str, str] = {}  # our name within a layer → GGUF's
        self.model: dict[str, str] = {}
        for kind in ("weight", "bias"):
            for module, theirs in spelling.layer.items():
                found = names.find(f"{spelling.stack}.0.{theirs}.{kind}")
                if found is not None and found.name:
                    self.layer.setdefault(found.name.removeprefix("layers.0."), f"{module}.{kind}")
            for module, theirs in spelling.model.items():
                found = names.find(f"{theirs}.{kind}")
                if found is not None and found.name:
                    self.model.setdefault(found.name, f"{module}.{kind}")

    def name(self, source: Source) -> str:
        """Spell a checkpoint's tensor as GGUF does."""
        stored = self.names.find(source.tensor)
        ours = stored.name if stored is not None else ""
        found = self.model.get(ours)
        if ours.startswith("layers."):
            _, number, inner = ours.split(".", 2)
            inside = self.layer.get(inner)
            found = inside and f"blk.{number}.{inside}"
        if not found:
            raise InvalidModel(f"tensor {source.tensor!r} has no name in GGUF files of this kind of model")
        return found

    def find(self, parameter: str) -> Iterator[TensorPlace]:
        """Yield the tensors that a parameter becomes."""
        module, _, kind = parameter.rpartition(".")
        merge = self.merges.get(module)
        if merge is None or merge.num_matrices == 1:
            for source, rows in cut_rows(self.sources, parameter):
                name, shape = self.name(source), source.shape
                is_row = name.rpartition(".")[0].rpartition(".")[2] in self.spelling.rows
                yield TensorPlace(name, rows, shape[1:] if is_row and len(shape) == 2 else shape)
            return
        first, count, width = 0, merge.num_matrices, self.sources[parameter][0].shape[1:]
        for part, height in merge.parts[: len(merge.parts) // count]:
            tensor = f"ffn_{part.rpartition('.')[2]}_exps"
            if tensor not in self.spelling.layer:
                raise InvalidModel(f"experts have no name in GGUF files of this kind of model: {tensor} is missing")
            name = f"blk.{parameter.split('.')[1]}.{tensor}.{kind}"
            yield TensorPlace(name, slice(first, first + height), (count, height, *width), count)
            first += height
