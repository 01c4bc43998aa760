"""What every checkpoint offers, whatever it is stored as."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from penstock.quant.packed import Stored

Format = Literal["safetensors", "gguf"]


class Checkpoint(Protocol):
    path: Path
    format: Format
    config: dict[str, Any]  # keys as in the family's config.json
    generation_config: dict[str, Any]
    quantization: str  # how most weights are stored: "bfloat16", "Q4_K_M", …
    num_bytes: int  # of all tensors as stored

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """A GGUF file's; None of a folder."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str: ...

    def tensor(self, name: str) -> torch.Tensor:
        """The values as the family's checkpoint has them, in a dtype torch computes with."""

    def stored(self, name: str) -> Stored | None:
        """A matrix in the file's own quantized blocks, rows as the family's checkpoint has them; None if it is not."""

    def tokenizer_source(self) -> Path | Mapping[str, Any]:
        """The folder, or the metadata, that the tokenizer is made from."""

    def close(self) -> None: ...
