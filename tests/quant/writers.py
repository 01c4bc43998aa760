"""Quantized folders as their own tools write them: each method's definition in a few lines of numpy.

A writer takes a module's name and its weight [O, C] and returns the tensors that stand for it and the values that they
mean, computed in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Array = np.ndarray
Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, Array]
F32 = np.float32


@dataclass(frozen=True)
class Method:
    """A method's settings in config.json, and its writer."""

    settings: dict[str, Any]
    write: Callable[[str, Array], Written]


def rtn(weight: Array, bits: int, group: int, symmetric: bool) -> tuple[Array, Array, Array]:
    """Round to codes [O, C] of `bits`, float16 scales and zeros [O, G]."""
    num_out, width = weight.shape
    cut = np.pad(weight, ((0, 0), (0, -width % group))).reshape(num_out, -1, group)
    most = 2**bits - 1
    if symmetric:
        scale = np.abs(cut).max(-1) / (2 ** (bits - 1) - 1)
        zero = np.full(scale.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(cut.min(-1), 0), np.maximum(cut.max(-1), 0)
        scale = (high - low) / most
        zero = np.clip(np.round(-low / np.maximum(scale, 1e-8)), 0, most).astype(int)
    scale = np.maximum(scale, 1e-6).astype(np.float16)
    codes = np.clip(np.round(cut / scale[..., None].astype(F32)) + zero[..., None], 0, most)
    return codes.reshape(num_out, -1)[:, :width].astype(np.uint8), scale, zero.astype(np.uint8)


def values_of(codes: Array, scale: Array, zero: Array, groups: Array) -> Array:
    """scale · (code − zero), for columns of these groups."""
    return scale.astype(F32)[:, groups] * (codes.astype(F32) - zero.astype(F32)[:, groups])


def pack(codes: Array, bits: int) -> Array:
    """Pack along the last dimension into int32 words, code i from bit i · bits on."""
    wide = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 32)))
    digits = np.unpackbits(wide.astype(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits]
    words = np.packbits(digits.reshape(len(codes), -1), axis=-1, bitorder="little").view("<i4")
    return words[:, : -(-codes.shape[1] * bits // 32)]


def tensor(values: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


# ---- compressed-tensors


def _group(weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    usual = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    return {"targets": ["Linear"], "weights": usual | dict(weights), "input_activations": None} | more


def compressed(form: str, *groups: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": _group(weights) for i, weights in enumerate(groups)},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
    } | more


def pack_quantized(
    bits: int, group: int, symmetric: bool = True, dtype: str = "float16", order: bool = False, strategy: str = ""
) -> Method:
    strategy = strategy or ("group" if group else "channel")
    weights = {"num_bits": bits, "strategy": strategy, "symmetric": symmetric}
    weights |= {"group_size": group} if group else {}
    weights |= {"actorder": "group"} if order else {}

    def write(module: str, weight: Array) -> Written:
        size = group or weight.shape[1]
        groups = np.arange(weight.shape[1]) // size
        if order:
            groups = np.random.default_rng(len(module)).permutation(groups)
        by_group = np.argsort(groups, kind="stable")
        sorted_codes, scale, zero = rtn(weight[:, by_group], bits, size, symmetric)
        codes = np.empty_like(sorted_codes)
        codes[:, by_group] = sorted_codes
        scales = tensor(scale).to(getattr(torch, dtype))
        found = {
            f"{module}.weight_packed": tensor(pack(codes, bits)),
            f"{module}.weight_scale": scales,
            f"{module}.weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            found[f"{module}.weight_zero_point"] = tensor(pack(zero.T, bits).T)
        if order:
            found[f"{module}.weight_g_idx"] = tensor(groups.astype(np.int32))
        return found, values_of(codes, scales.float().numpy(), zero, groups)

    return Method(compressed("pack-quantized", weights), write)


def int_quantized(strategy: str, symmetric: bool = True, dtype: str = "float32") -> Method:
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}

    def write(module: str, weight: Array) -> Written:
        codes, scale, zero = rtn(weight, 8, weight.shape[1], symmetric)
        if strategy == "tensor":
            scale, zero = scale[:1], zero[:1]
        scales = (tensor(scale).float() * 1.0001).to(getattr(torch, dtype))
        found = {f"{module}.weight": tensor((codes ^ 128).view(np.int8)), f"{module}.weight_scale": scales}
        if not symmetric:
            found[f"{module}.weight_zero_point"] = tensor((zero ^ 128).view(np.int8))
        rows = np.zeros(weight.shape[1], dtype=int)
        spread, zeros = (np.broadcast_to(each, (len(weight), 1)) for each in (scales.float().numpy(), zero))
        return found, values_of(codes, spread, zeros, rows)

    settings = compressed("int-quantized", {"strategy": strategy, "symmetric": symmetric})
    settings["config_groups"]["group_0"]["input_activations"] = inputs
    return Method(settings, write)


def to_fp8(weight: Array, scale: Array) -> tuple[torch.Tensor, Array]:
    """Round weight / scale to e4m3; and those values."""
    codes = (tensor(weight) / tensor(scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, codes.float().numpy()


def blocks_of(weight: Array, size: int) -> Array:
    """The largest magnitude of each block of size × size, spread over it: [O, C]; and alone."""
    padded = np.pad(np.abs(weight), [(0, -n % size) for n in weight.shape])
    return padded.reshape(padded.shape[0] // size, size, -1, size).max((1, 3))


def float_quantized(strategy: str, block: int = 32) -> Method:
    weights: dict[str, Any] = {"type": "float", "strategy": strategy}
    weights |= {"block_structure": [block, block]} if strategy == "block" else {}
    weights |= {"group_size": block} if strategy.endswith("group") else {}

    def write(module: str, weight: Array) -> Written:
        most = {"tensor": np.abs(weight).max().reshape(1), "channel": np.abs(weight).max(1, keepdims=True)}
        scale = (most[strategy] if strategy in most else blocks_of(weight, block)).astype(F32) / F32(448)
        spread = scale
        if strategy == "block":
            spread = scale.repeat(block, 0).repeat(block, 1)[: weight.shape[0], : weight.shape[1]]
        if strategy.endswith("group"):
            scale = np.abs(weight).reshape(len(weight), -1, block).max(-1) / F32(448)
            spread = scale.repeat(block, 1)
        codes, rounded = to_fp8(weight, spread)
        found = {f"{module}.weight": codes, f"{module}.weight_scale": tensor(scale)}
        found[f"{module}.input_scale"] = torch.ones(1)
        return found, rounded * spread

    return Method(compressed("float-quantized", weights), write)


# ---- folders


def quantize_folder(
    source: Path, target: Path, method: Method, skip: tuple[str, ...] = ("lm_head",)
) -> dict[str, Array]:
    """Write a plain folder again with its linears quantized; return the values that each quantized weight means."""
    from safetensors.torch import load_file

    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    found: Tensors = {}
    meant: dict[str, Array] = {}
    for name, value in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        linear = value.ndim == 2 and name.endswith(".weight") and not any(part in name for part in ("embed", *skip))
        if linear:
            tensors, meant[name] = method.write(module, value.float().numpy())
            found |= tensors
        else:
            found[name] = value
    config |= {"dtype": "bfloat16", "quantization_config": method.settings}
    (target / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous().clone() for name, value in found.items()}, target / "model.safetensors")
    return meant
