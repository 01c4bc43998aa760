"""The interface of every checkpoint format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch

from penstock.quant.packed import GgmlMatrix, Stored

Format = Literal["safetensors", "gguf"]


class Span(NamedTuple):
    """The bytes of a stored tensor."""

    path: Path
    begin: int
    end: int


class Checkpoint(Protocol):
    """A model's config and tensors, in any format."""

    path: Path
    format: Format
    config: dict[str, Any]  # keys as in the family's config.json
    generation_config: dict[str, Any]
    quantization: str  # of most weights: "bfloat16", "Q4_K_M", …
    num_bytes: int  # of all tensors as stored

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """Metadata of a GGUF file; None for a folder."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """Return the dtype that values are kept in; the file's own, or one for those that are widened."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return the values as in the family's checkpoint, in a dtype torch computes with."""

    def read_ggml(self, name: str) -> GgmlMatrix | None:
        """Return a matrix in the file's quantized blocks, rows as in the family's checkpoint; None if not quantized."""

    def read_codes(self, name: str) -> Stored | None:
        """Return a matrix in its codes, where a packed format holds them; None for a GGUF file's."""

    def is_packed(self, name: str) -> bool:
        """Return True if a CPU multiplies the tensor as it is stored, as far as its header tells."""

    def list_spans(self) -> dict[str, Span]:
        """Return where each stored tensor is, under the name that the file gives it."""

    def tokenizer_source(self) -> Path | Mapping[str, Any]:
        """Return the folder or the metadata that the tokenizer is made from."""

    def close(self) -> None: ...
