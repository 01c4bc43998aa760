"""A GGUF model in one file or in several, `NAME-00001-of-0000N.gguf`: one set of metadata and tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.errors import InvalidModel
from penstock.host.gguf_parts import MAX_PARTS, PartName, parse_part
from penstock.models.files.checkpoint import Span
from penstock.models.files.gguf import GgufFile, TensorInfo
from penstock.models.files.json_file import quote_name

REMEDY = "put all parts of one download into one folder"


class GgufModel:
    """The metadata of the first part, and the tensors of all; every part is mapped, none is read whole."""

    def __init__(self, path: Path) -> None:
        """Open the model by any of its parts."""
        self.parts: list[GgufFile] = []
        try:
            self._open(path)
        except InvalidModel:
            self.close()
            raise
        self.path = self.parts[0].path
        self.metadata = self.parts[0].metadata
        self.tensors: dict[str, TensorInfo] = {name: info for part in self.parts for name, info in part.tensors.items()}
        self._owners = {name: part for part in self.parts for name in part.tensors}

    def _open(self, path: Path) -> None:
        named = GgufFile(path)
        self.parts = [named]
        count = _split_number(named, "split.count", 0, MAX_PARTS, 0)
        if count <= 1:
            return
        name = _check_name(named, count)
        others = [path.with_name(each) for each in name.all()]
        missing = [other.name for other in others if other != path and not other.is_file()]
        if missing:
            raise InvalidModel(
                f"{path}: the model has {count} parts and {missing[0]} is missing"
                f"{f' with {len(missing) - 1} more' if len(missing) > 1 else ''}; {REMEDY}"
            )
        self.parts = []
        for other in others:
            self.parts.append(named if other == path else GgufFile(other))
        _check_together(self.parts)

    def raw(self, info: TensorInfo) -> np.ndarray:
        """Return the tensor's bytes, mapped from its file."""
        return self._owners[info.name].raw(info)

    def list_spans(self) -> dict[str, Span]:
        return {
            name: Span(self._owners[name].path, info.start, info.start + info.num_bytes)
            for name, info in self.tensors.items()
        }

    def close(self) -> None:
        for part in self.parts:
            part.close()


def _split_number(part: GgufFile, key: str, min_value: int, max_value: int, default: int | None = None) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int or not min_value <= value <= max_value:
        state = "is missing" if value is None else f"is {quote_name(str(value))}"
        raise InvalidModel(
            f"{part.path}: metadata key {key} {state}; it must be a whole number from {min_value} to {max_value}; "
            "fetch the file again"
        )
    return value


def _check_name(part: GgufFile, count: int) -> PartName:
    """Compare a part's name with its metadata: the other parts are found by name."""
    number = _split_number(part, "split.no", 0, count - 1) + 1
    name = parse_part(part.path.name)
    if name is None or (name.number, name.count) != (number, count):
        raise InvalidModel(
            f"{part.path} is part {number} of {count} of a model, and its name must end in "
            f"-{number:05}-of-{count:05}.gguf for the others to be found; rename it as it was published"
        )
    return name


def _check_together(parts: list[GgufFile]) -> None:
    first, seen = parts[0], dict[str, GgufFile]()
    total = _split_number(first, "split.tensors.count", 1, (1 << 31) - 1)
    for part in parts:
        for key, expected in (("split.count", len(parts)), ("split.tensors.count", total)):
            if part.metadata.get(key) != expected:
                raise InvalidModel(
                    f"{part.path}: {key} is {quote_name(str(part.metadata.get(key)))}, {first.path.name} says "
                    f"{expected}: they are not of one model; {REMEDY}"
                )
        _check_name(part, len(parts))
        for key, value in part.metadata.items():
            if key.startswith("general.arch") and value != first.metadata.get(key):
                raise InvalidModel(f"{part.path}: {key} differs from that in {first.path.name}; {REMEDY}")
        for name in part.tensors:
            if name in seen:
                raise InvalidModel(f"{part.path}: tensor {quote_name(name)} is in {seen[name].path.name} too; {REMEDY}")
            seen[name] = part
    if len(seen) != total:
        raise InvalidModel(
            f"{first.path}: split.tensors.count is {total}, the {len(parts)} parts hold {len(seen)} tensors; "
            "fetch the model again"
        )
