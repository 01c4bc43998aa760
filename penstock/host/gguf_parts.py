"""Names of a GGUF model that is split over several files: `NAME-00001-of-0000N.gguf`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MAX_PARTS = 1 << 12
_PART = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class PartName:
    """One file's name. Parts are numbered from 1."""

    base: str
    number: int
    count: int
    suffix: str = ".gguf"

    def __str__(self) -> str:
        return f"{self.base}-{self.number:05}-of-{self.count:05}{self.suffix}"

    @property
    def whole(self) -> str:
        """The name the model would have in one file."""
        return self.base + self.suffix

    def all(self) -> list[str]:
        """Return the names of all parts, in order."""
        return [str(PartName(self.base, number, self.count, self.suffix)) for number in range(1, self.count + 1)]


def parse_part(name: str) -> PartName | None:
    """Return what a file's name says; None if it is not that of a part of several."""
    found = _PART.fullmatch(name)
    if found is None:
        return None
    part = PartName(found["base"], int(found["number"]), int(found["count"]), found["suffix"])
    return part if 1 <= part.number <= part.count <= MAX_PARTS and part.count > 1 else None


def first_parts(names: Iterable[str]) -> list[str]:
    """Leave out all parts but the first of each model; names without parts stay."""
    kept = []
    for name in names:
        part = parse_part(name)
        if part is None or part.number == 1:
            kept.append(name)
    return kept


def all_parts(name: str) -> list[str]:
    """Return the names of all parts of the model that `name` is a part of; `name` alone if it is whole."""
    part = parse_part(name)
    return part.all() if part else [name]


def model_files(path: Path) -> list[Path]:
    """Return the files that hold a model's weights, of those that are there: a GGUF file with its other parts, or a
    folder's safetensors."""
    if path.is_dir():
        return list(path.glob("*.safetensors"))
    return [file for file in (path.with_name(name) for name in all_parts(path.name)) if file.is_file()]
