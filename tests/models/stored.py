"""A checkpoint held in a dict, for tests that add, drop or rename tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from penstock.models.files.checkpoint import Span


class Stored:
    format: Literal["safetensors", "gguf"] = "safetensors"
    quantization = "float32"
    metadata = None
    generation_config: dict[str, Any] = {}

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor], path: Path = Path("model")) -> None:
        self.config, self.tensors, self.path = config, tensors, path
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> str:
        return str(self.tensors[name].dtype).removeprefix("torch.")

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def read_ggml(self, name: str) -> None:
        return None

    def read_codes(self, name: str) -> None:
        return None

    def is_packed(self, name: str) -> bool:
        return False

    def list_spans(self) -> dict[str, Span]:
        return {}

    def tokenizer_source(self) -> Path:
        return self.path

    def close(self) -> None: ...
