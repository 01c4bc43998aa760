"""Typed reading of GGUF metadata under one architecture's prefix; what nobody read can be refused."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from penstock.errors import InvalidModel
from penstock.models.files.damage import shown
from penstock.models.files.gguf import GgufFile

MAX_COUNT = (1 << 31) - 1
MAX_VECTOR = 1 << 14

# Keys that say nothing about the maths, or nothing that the tensors do not say.
HARMLESS = frozenset(
    {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type", "embedding_length_out"}
)


class Keys:
    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.metadata = file.metadata
        self.tensors = file.tensors
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise InvalidModel("the metadata has no general.architecture")
        self.architecture = architecture
        self.read = set(HARMLESS)

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def vector(self, tensor: str) -> list[float]:
        """The numbers of a float32 vector; none when there is no such tensor."""
        info = self.tensors.get(tensor)
        if info is None:
            return []
        if info.ggml_type != 0 or len(info.shape) != 1 or info.shape[0] > MAX_VECTOR:
            raise InvalidModel(f"tensor {tensor!r} must be a float32 vector of at most {MAX_VECTOR} numbers")
        return [float(str(each)) for each in self.file.raw(info).view("<f4")]

    def get(self, key: str) -> Any:
        self.read.add(key)
        return self.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; a list of equal ones (one per layer) is that number."""
        value = self.get(key)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= MAX_COUNT:
            raise self._wrong(key, value, f"a whole number from 1 to {MAX_COUNT}")
        return value

    def optional_count(self, key: str) -> int | None:
        """As `count`; absent and 0 both mean none."""
        return None if self.get(key) in (None, 0) else self.count(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. The file's float32 becomes the decimal it was rounded from: 1e-05, not 9.99999975e-06."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return float(str(np.float32(value))) if abs(value) < 3e38 else float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return default if value is None else value

    def require(self, key: str, allowed: Collection[Any]) -> None:
        """Refuses a value that asks for what no family computes."""
        value = self.get(key)
        if value is not None and not any(type(value) is type(each) and value == each for each in allowed):
            raise self._wrong(key, value, f"{' or '.join(map(str, allowed))}, nothing else is supported")

    def refuse_unread(self) -> None:
        prefix = f"{self.architecture}."
        for key in self.metadata:
            if key.startswith(prefix) and key[len(prefix) :] not in self.read:
                raise InvalidModel(
                    f"metadata key {shown(key)} is not understood and may change the results: the model is refused"
                )

    def _wrong(self, key: str, value: Any, limit: str) -> InvalidModel:
        state = "is missing" if value is None else f"is {shown(str(value))}"
        return InvalidModel(f"metadata key {self.architecture}.{key} {state}; it must be {limit}")
