"""2:4 sparse matrices of compressed-tensors: a bit for each value, and the values that are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.models.config import Config
from penstock.models.files.quantized.matrix import FLOATS, PartHeader, Parts, QuantizedMatrix, fits_kernel
from penstock.quant.coded import Coded, code_floats

FORMATS = ("dense", "sparse-24-bitmask")
KEPT = (*FLOATS, "int8", "float8_e4m3fn")


@dataclass(frozen=True)
class SparseScale:
    """The scales of a sparse matrix of 8-bit values: of groups of inputs, or of blocks."""

    part: PartHeader
    group: int
    block: tuple[int, int] | None


FindScale = Callable[[str, PartHeader], SparseScale]


def find_sparse(parts: Parts, c: Config | None, find_scale: FindScale) -> list[QuantizedMatrix]:
    """Find sparse matrices; `find_scale` describes the scales of one whose values are of 8 bits."""
    if c is not None:
        c.choice("format", choices={name: name for name in FORMATS}, default="dense")
        c.only("sparsity_structure", "2:4", "unstructured", "0:0")
        c.ignore("targets", "ignore", "global_sparsity", "registry_requires_subclass")
    return [_find(parts, module, kept, find_scale) for module, kept in parts.modules("compressed")]


def _find(parts: Parts, module: str, kept: PartHeader, find_scale: FindScale) -> QuantizedMatrix:
    num_out, half = parts.check_matrix(parts.check(kept, KEPT))
    shape = num_out, 2 * half
    bitmask = parts.check(parts.need(f"{module}.bitmask", kept), "uint8", (num_out, -(-shape[1] // 8)))
    listed = parts.check(parts.need(f"{module}.shape", kept), ("int64", "int32"), (2,), (2, 1))
    if parts.read(listed).flatten().tolist() != list(shape):
        parts.refuse(listed, f"is not {list(shape)}, the shape of 2:4 sparse {list(kept.shape)}")
    scale = None if kept.dtype in FLOATS else find_scale(module, kept)

    def read_values() -> Tensor:
        bits = parts.read(bitmask)
        at = torch.arange(8, dtype=torch.uint8)
        mask = (bits[..., None] >> at & 1).bool().flatten(1)[:, : shape[1]]
        if bool((mask.sum(dim=1) != half).any()):
            parts.refuse(bitmask, f"keeps another number than {half} of a row's {shape[1]} values")
        values = parts.read(kept)
        plain = values.view(torch.uint8) if values.element_size() == 1 else values
        dense = torch.zeros(shape, dtype=plain.dtype)
        dense[mask] = plain.flatten()
        return dense.view(values.dtype)

    def read() -> Coded | Tensor:
        values = read_values()
        if scale is None:
            return values.float()
        scales = parts.read_scale(scale.part)
        if values.dtype != torch.int8:
            return code_floats(values, scales, scale.block)
        spread = scales.reshape(1, 1).expand(num_out, 1) if scales.numel() == 1 else scales.reshape(num_out, -1)
        return Coded(values.view(torch.uint8) ^ 128, spread, scale.group, 128)

    used = (kept.name, bitmask.name, listed.name, *([] if scale is None else [scale.part.name]))
    kind = {"int8": "int8 2:4", "float8_e4m3fn": "fp8 2:4"}.get(kept.dtype, f"{kept.dtype} 2:4")
    packs = kept.dtype == "int8" and scale is not None and fits_kernel(scale.group, shape[1])
    is_float8, block = kept.dtype == "float8_e4m3fn", None if scale is None else scale.block
    group = block[1] if is_float8 and block else 0
    return QuantizedMatrix(f"{module}.weight", shape, kind, used, read, packs, is_float8, group)
