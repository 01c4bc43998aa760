"""The tensors of a rounded matrix in compressed-tensors files."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.quantize.grids import Grid
from penstock.quantize.targets import Target


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack signed codes[R, C] along rows to int32, offset to be unsigned, lowest bits first → [R, C · bits / 32]."""
    per_word = 32 // bits
    unsigned = (codes.to(torch.int64) + (1 << bits - 1)).numpy().astype(np.uint32)
    padded = np.pad(unsigned, ((0, 0), (0, -unsigned.shape[1] % per_word)))
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    words = np.bitwise_or.reduce(padded.reshape(len(padded), -1, per_word) << shifts, axis=2)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def pack_matrix(name: str, codes: Tensor, grid: Grid, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name and lay out the tensors of a matrix that a plain checkpoint calls `name`."""
    found = {f"{name}_scale": grid.scale.to(dtype)}
    if target.kind == "fp8" or target.activations:
        values = codes.to(torch.float8_e4m3fn if target.kind == "fp8" else torch.int8)
        return found | (pack_sparse(name, values) if is_sparse(target) else {name: values})
    found |= {f"{name}_packed": pack_words(codes, grid.bits), f"{name}_shape": torch.tensor(codes.shape)}
    if grid.zero is not None:
        found[f"{name}_zero_point"] = pack_words(grid.zero.t(), grid.bits).t().contiguous()
    return found


def is_sparse(target: Target) -> bool:
    """Return True if two of four values are left out: words of several codes have no such form."""
    return target.sparsity == "2:4" and (target.kind in ("dense", "fp8") or target.activations == "int8")


def pack_sparse(name: str, values: Tensor) -> dict[str, Tensor]:
    """Keep two of every four values[R, C], and a bit for each that says which: `sparse-24-bitmask`."""
    four = (values.float() != 0).view(len(values), -1, 4)
    if bool((four.sum(-1) > 2).any()):
        raise ValueError(f"{name} has more than two values in four")
    first = torch.argsort(four.int(), dim=-1, descending=True, stable=True)[..., :2]
    mask = torch.zeros_like(four).scatter_(-1, first, True).view(values.shape)
    plain = values.view(torch.uint8) if values.element_size() == 1 else values
    module = name.removesuffix(".weight")
    return {
        f"{module}.compressed": plain[mask].view(len(values), -1).view(values.dtype),
        f"{module}.bitmask": torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little")),
        f"{module}.shape": torch.tensor(values.shape)[:, None],
    }


def describe(target: Target, ignored: list[str]) -> dict[str, object] | None:
    """Describe the format as config.json's quantization_config does; None if it is a plain model."""
    sparsity = {
        "format": "sparse-24-bitmask",
        "global_sparsity": 0.5,
        "sparsity_structure": "2:4",
        "targets": ["Linear"],
        "ignore": ignored,
    }
    common: dict[str, object] = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
    common |= {"ignore": ignored, "kv_cache_scheme": None} | (
        {"sparsity_config": sparsity} if is_sparse(target) else {}
    )
    if target.kind == "dense":
        return {"format": "dense", "config_groups": {}} | common if is_sparse(target) else None
    kind = "float" if target.kind == "fp8" else "int"
    weights: dict[str, object] = {
        "num_bits": target.bits,
        "type": kind,
        "symmetric": target.symmetric,
        "strategy": "group" if target.group else "channel",
        "group_size": target.group or None,
        "dynamic": False,
    }
    inputs = None
    if target.activations:
        inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    form = "float-quantized" if target.kind == "fp8" else "int-quantized" if target.activations else "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"format": form, "config_groups": {"group_0": group}} | common
