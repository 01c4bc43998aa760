"""Quantized matrices as their headers describe them, and the checks that all methods share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from penstock.errors import InvalidModel
from penstock.models.files.json_file import quote_name
from penstock.models.files.safetensors import SafetensorsCheckpoint
from penstock.ops import FORMATS, Format
from penstock.ops.matmul.packed import GROUP
from penstock.quant.coded import Coded
from penstock.quant.recoded import find_layout

Shape = tuple[int, ...]
FLOATS = ("float16", "bfloat16", "float32")
FP8_SCALES = (*FLOATS, "float8_e8m0fnu")  # powers of two, too
ZEROS = ("qzeros", "zero_point", ".zero")  # ends of names
REMEDY = "fetch the model again, or quantize it again"


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix of the plain model: `read` gives its codes, or its values where no packed format holds them."""

    name: str
    shape: Shape  # as the plain checkpoint has it
    kind: str  # "int4 g128", "fp8", …
    parts: tuple[str, ...]  # the tensors that it is made of
    read: Callable[[], Coded | torch.Tensor]
    is_packed: bool = True  # as far as the header tells
    is_requantized: bool = False  # a CPU multiplies it as integers of 8 bits, since no packed format holds its values
    group: int = 0  # of 8-bit floats: inputs with one scale, 0 for all of an output's

    @property
    def is_float8(self) -> bool:
        return self.kind.startswith("fp8")

    @property
    def has_gpu_codes(self) -> bool:
        """Return True if a GPU keeps its integers, as far as the header tells."""
        return self.likely_format is not None and find_layout((self.likely_format,)) is not None

    @property
    def likely_format(self) -> Format | None:
        """The packed format of its codes, or one of the same size, as far as the header tells; None if it has none."""
        if not self.is_packed:
            return None
        first = self.kind.split()[0]
        if not first.startswith("int"):
            return FORMATS[{"nf4": "NF4", "fp4": "BNB_FP4", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}[first]]
        bits = int(first.removeprefix("int"))
        if bits <= 4:
            return FORMATS["U4_F32"]
        is_plain = bits == 8 and not any(part.endswith(ZEROS) for part in self.parts)
        return FORMATS["S8_F32" if is_plain else "U8_F32"]


@dataclass(frozen=True)
class PartHeader:
    """A tensor that a matrix is made of."""

    name: str
    dtype: str
    shape: Shape


@dataclass
class Parts:
    """The tensors of a folder, by module; those that were found or are knowingly ignored."""

    file: SafetensorsCheckpoint
    used: set[str] = field(default_factory=set)

    def modules(self, suffix: str) -> Iterator[tuple[str, PartHeader]]:
        """Yield the modules that have a tensor of this name, and the tensor."""
        for name in self.file.names():
            module, _, last = name.rpartition(".")
            if last == suffix and module:
                yield module, self.take(name)

    def take(self, name: str) -> PartHeader:
        self.used.add(name)
        return PartHeader(name, self.file.dtype(name), tuple(self.file.shape(name)))

    def find(self, name: str) -> PartHeader | None:
        return self.take(name) if name in self.file.entries else None

    def need(self, name: str, of: PartHeader) -> PartHeader:
        found = self.find(name)
        if found is None:
            self.refuse(of, f"lacks its part {quote_name(name)}")
        return found

    def refuse(self, part: PartHeader, reason: str) -> NoReturn:
        shard = self.file.entries[part.name][0]
        raise InvalidModel(f"{self.file.path / shard}: tensor {quote_name(part.name)} {reason}; {REMEDY}")

    def check(self, part: PartHeader, dtypes: str | Sequence[str], *shapes: Shape) -> PartHeader:
        """Require one of these dtypes, and one of these shapes."""
        dtypes = (dtypes,) if isinstance(dtypes, str) else dtypes
        if part.dtype not in dtypes:
            self.refuse(part, f"holds {part.dtype}, where {' or '.join(dtypes)} is needed")
        if shapes and part.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            self.refuse(part, f"has shape {list(part.shape)}, where {wanted} is needed")
        return part

    def check_matrix(self, part: PartHeader) -> tuple[int, int]:
        if len(part.shape) != 2 or 0 in part.shape:
            self.refuse(part, f"has shape {list(part.shape)}, where a matrix is needed")
        return part.shape[0], part.shape[1]

    def read(self, part: PartHeader) -> torch.Tensor:
        return self.file.tensor(part.name)

    def read_scale(self, part: PartHeader) -> torch.Tensor:
        """Read scales; require finite ones."""
        scales = self.read(part)
        if not bool(scales.float().isfinite().all()):
            self.refuse(part, "holds scales that are infinite or no number")
        return scales

    def check_range(self, part: PartHeader, values: torch.Tensor, limit: int) -> torch.Tensor:
        """Require integers from 0 to below `limit`."""
        low, high = (int(values.min()), int(values.max())) if values.numel() else (0, 0)
        if low < 0 or high >= limit:
            self.refuse(part, f"holds {low if low < 0 else high}, where 0 to {limit - 1} are possible")
        return values


def name_group(bits: int, group: int, width: int) -> str:
    return f"int{bits}" + (f" g{group}" if group < width else "")


def fits_kernel(group: int, width: int) -> bool:
    """Return True if a group's scale can be repeated for each group of the kernels."""
    return group >= width or group % GROUP == 0


def sort_groups(groups: torch.Tensor, group: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the order that brings the columns of each group together; or, where sizes differ, the groups themselves.

    Both are None if they are together as they lie.
    """
    whole = torch.arange(len(groups)) // group
    if torch.equal(groups.long(), whole):
        return None, None
    order = torch.argsort(groups.long(), stable=True)
    return (order, None) if torch.equal(groups.long()[order], whole) else (None, groups.long())
