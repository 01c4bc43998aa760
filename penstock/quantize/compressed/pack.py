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
    if target.kind == "fp8":
        return {name: codes.to(torch.float8_e4m3fn), **found}
    if target.activations:
        return {name: codes.to(torch.int8), **found}
    found |= {f"{name}_packed": pack_words(codes, grid.bits), f"{name}_shape": torch.tensor(codes.shape)}
    if grid.zero is not None:
        found[f"{name}_zero_point"] = pack_words(grid.zero.t(), grid.bits).t().contiguous()
    return found


def describe(target: Target, ignored: list[str]) -> dict[str, object]:
    """Describe the format as config.json's quantization_config does."""
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
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }
