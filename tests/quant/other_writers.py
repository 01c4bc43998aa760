"""GPTQ, AWQ, FP8, bitsandbytes, HQQ and 2:4 sparse folders, as in writers.py."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from tests.quant.writers import F32, Array, Method, Written, blocks_of, compressed, pack, rtn, tensor, to_fp8, values_of


def gptq(bits: int, group: int, symmetric: bool = True, order: bool = False, v2: bool = False, **more: Any) -> Method:
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": order,
        "damp_percent": 0.01,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }

    def write(module: str, weight: Array) -> Written:
        width = weight.shape[1]
        size = width if group == -1 else group
        groups = np.arange(width) // size
        if order:
            groups = np.random.default_rng(sum(map(ord, module.rpartition(".")[0]))).permutation(groups)
        by_group = np.argsort(groups, kind="stable")
        sorted_codes, scale, zero = rtn(weight[:, by_group], bits, size, symmetric)
        codes = np.empty_like(sorted_codes)
        codes[:, by_group] = sorted_codes
        stored = zero.T if v2 else (zero.T.astype(int) - 1) % 2**bits
        found = {
            f"{module}.qweight": tensor(pack(codes, bits).T),
            f"{module}.qzeros": tensor(pack(stored.astype(np.uint8), bits)),
            f"{module}.scales": tensor(scale.T),
            f"{module}.g_idx": tensor(groups.astype(np.int32)),
        }
        return found, values_of(codes, scale, zero, groups)

    return Method(settings | more, write)


AWQ_COLUMNS = np.array([0, 2, 4, 6, 1, 3, 5, 7])


def pack_awq(codes: Array) -> Array:
    """Eight columns to a word, nibble i being column AWQ_COLUMNS[i]."""
    return pack(codes.reshape(len(codes), -1, 8)[:, :, AWQ_COLUMNS].reshape(codes.shape), 4)


def awq(group: int) -> Method:
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}

    def write(module: str, weight: Array) -> Written:
        codes, scale, zero = rtn(weight, 4, group, symmetric=False)
        found = {
            f"{module}.qweight": tensor(pack_awq(codes.T)),
            f"{module}.qzeros": tensor(pack_awq(zero.T)),
            f"{module}.scales": tensor(scale.T),
        }
        return found, values_of(codes, scale, zero, np.arange(weight.shape[1]) // group)

    return Method(settings | {"modules_to_not_convert": None, "backend": "autoawq"}, write)


def fp8(kind: str, block: int = 32) -> Method:
    """`kind`: block, tensor, or row as fbgemm_fp8 writes it."""
    settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    settings |= {"weight_block_size": [block, block]} if kind == "block" else {"activation_scheme": "static"}
    if kind == "row":
        settings = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}

    def write(module: str, weight: Array) -> Written:
        most = {"tensor": np.abs(weight).max(), "row": np.abs(weight).max(1, keepdims=True)}
        scale = np.asarray((most[kind] if kind in most else blocks_of(weight, block)) / 448, dtype=F32)
        spread = scale
        if kind == "block":
            spread = scale.repeat(block, 0).repeat(block, 1)[: weight.shape[0], : weight.shape[1]]
        codes, rounded = to_fp8(weight, spread)
        name = "weight_scale_inv" if kind == "block" else "weight_scale"
        found = {f"{module}.weight": codes, f"{module}.{name}": tensor(scale)}
        if kind == "tensor":
            found[f"{module}.input_scale"] = torch.tensor(0.5)
        return found, rounded * spread

    return Method(settings, write)


NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
    + [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
    + [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    dtype=F32,
)
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3], dtype=F32) / F32(12)


def bitsandbytes(kind: str, nested: bool = False, block: int = 64) -> Method:
    table = {"nf4": NF4, "fp4": FP4}[kind]
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    settings |= {"bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": "bfloat16"}

    def write(module: str, weight: Array) -> Written:
        flat = weight.ravel()
        cut = np.pad(flat, (0, -len(flat) % block)).reshape(-1, block)
        scale = np.abs(cut).max(1).astype(F32)
        codes = np.abs(cut[..., None] / scale[:, None, None] - table).argmin(-1).astype(np.uint8).ravel()[: len(flat)]
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
        name = f"{module}.weight"
        found = {name: tensor((codes[0::2] << 4 | codes[1::2])[:, None]), f"{name}.quant_map": tensor(table)}
        if nested:
            size, map_ = 256, np.linspace(-1, 1, 256, dtype=F32)
            offset = float(scale.mean())
            inner = np.pad(scale - F32(offset), (0, -len(scale) % size)).reshape(-1, size)
            most = np.abs(inner).max(1).astype(F32)
            small = np.abs((inner / most[:, None])[..., None] - map_).argmin(-1).astype(np.uint8).ravel()[: len(scale)]
            scale = map_[small] * most.repeat(size)[: len(scale)] + F32(offset)
            state |= {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset}
            found |= {f"{name}.absmax": tensor(small), f"{name}.nested_absmax": tensor(most)}
            found[f"{name}.nested_quant_map"] = tensor(map_)
        else:
            found[f"{name}.absmax"] = tensor(scale)
        text = np.frombuffer(json.dumps(state).encode(), dtype=np.uint8).copy()
        found[f"{name}.quant_state.bitsandbytes__{kind}"] = tensor(text)
        return found, (table[codes] * scale.repeat(block)[: len(flat)]).reshape(weight.shape)

    return Method(settings, write)


def llm_int8() -> Method:
    def write(module: str, weight: Array) -> Written:
        most = np.abs(weight).max(1).astype(F32)
        codes = np.round(weight * (127 / most)[:, None]).astype(np.int8)
        found = {f"{module}.weight": tensor(codes), f"{module}.SCB": tensor(most)}
        found[f"{module}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
        return found, codes.astype(F32) * (most * F32(7.874015718698502e-3))[:, None]

    return Method({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}, write)


def hqq(bits: int, group: int, axis: int = 1) -> Method:
    def write(module: str, weight: Array) -> Written:
        cut = weight.reshape(-1, group) if axis == 1 else weight.reshape(group, -1)
        low, high = cut.min(axis, keepdims=True), cut.max(axis, keepdims=True)
        scale = ((high - low) / (2**bits - 1)).astype(np.float16)
        zero = (-low / scale.astype(F32)).astype(np.float16)
        codes = np.clip(np.round(cut / scale.astype(F32) + zero.astype(F32)), 0, 2**bits - 1).astype(np.uint8)
        fields, kind = (10, np.int32) if bits == 3 else (8 // bits, np.uint8)
        step = -(-len(codes) // fields)
        rows = np.pad(codes, ((0, step * fields - len(codes)), (0, 0))).astype(kind).reshape(fields, step, -1)
        packed = np.asarray(np.sum([rows[at] << bits * (fields - 1 - at) for at in range(fields)], axis=0, dtype=kind))
        numbers = {"nbits": bits, "group_size": group, "axis": axis}
        found = {f"{module}.{name}": torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()}
        found |= {f"{module}.W_q": tensor(packed), f"{module}.scale": tensor(scale), f"{module}.zero": tensor(zero)}
        found |= {f"{module}.shape": torch.tensor(weight.shape)}
        found |= {f"{module}.{name}": torch.tensor(0, dtype=torch.uint8) for name in ("quant_scale", "view_as_float")}
        found[f"{module}.packing"] = tensor(np.frombuffer(f"{bits}bit_u8".encode(), dtype=np.uint8).copy())
        values = (codes.astype(F32) - zero.astype(F32)) * scale.astype(F32)
        return found, values.reshape(weight.shape)

    settings = {"quant_config": {"weight_quant_params": {"nbits": bits}}, "skip_modules": ["lm_head"]}
    return Method({"quant_method": "hqq"} | settings, write)


def sparse(kind: str = "") -> Method:
    """2:4 sparse, the values as they are or in int8 or fp8 with a scale for each output."""

    def write(module: str, weight: Array) -> Written:
        four = weight.reshape(len(weight), -1, 4)
        kept = np.zeros(four.shape, dtype=bool)
        np.put_along_axis(kept, np.argsort(-np.abs(four), axis=-1)[..., :2], True, axis=-1)
        mask = kept.reshape(weight.shape)
        pruned = np.where(mask, weight, 0).astype(F32)
        scale = np.abs(pruned).max(1, keepdims=True).astype(F32) / F32(448 if kind == "fp8" else 127)
        stored = {
            "fp8": lambda: to_fp8(pruned, scale)[0],
            "int8": lambda: tensor(np.round(pruned / scale)).to(torch.int8),
        }
        values = stored.get(kind, lambda: tensor(pruned).to(torch.bfloat16))()
        raw = values.view(torch.uint8) if values.element_size() == 1 else values
        short = raw[tensor(mask)].view(len(weight), -1).view(values.dtype)
        found = {f"{module}.compressed": short, f"{module}.shape": torch.tensor([[n] for n in weight.shape])}
        found[f"{module}.bitmask"] = tensor(np.packbits(mask, axis=-1, bitorder="little"))
        if kind:
            found[f"{module}.weight_scale"] = tensor(scale)
        return found, values.float().numpy() * (scale if kind else F32(1))

    form = {"": "dense", "int8": "int-quantized", "fp8": "float-quantized"}[kind]
    weights = [{"type": "float" if kind == "fp8" else "int", "strategy": "channel"}] if kind else []
    sparsity = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "global_sparsity": 0.5, "targets": []}
    return Method(compressed(form, *weights, sparsity_config=sparsity), write)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=F32)


def nvfp4() -> Method:
    def write(module: str, weight: Array) -> Written:
        cut = weight.reshape(len(weight), -1, 16)
        divisor = F32(448 * 6) / np.abs(weight).max().astype(F32)
        small = tensor(np.abs(cut).max(-1) / 6 * divisor).to(torch.float8_e4m3fn)
        scale = small.float().numpy() / divisor
        codes = np.abs((cut / np.maximum(scale, 1e-9)[..., None])[..., None] - E2M1).argmin(-1).astype(np.uint8)
        flat = codes.reshape(weight.shape)
        found = {f"{module}.weight_packed": tensor(flat[:, 0::2] | flat[:, 1::2] << 4), f"{module}.weight_scale": small}
        found[f"{module}.weight_global_scale"] = torch.tensor([divisor])
        return found, (E2M1[codes] * scale[..., None]).reshape(weight.shape)

    group = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return Method(compressed("nvfp4-pack-quantized", group), write)


def mxfp4() -> Method:
    def write(module: str, weight: Array) -> Written:
        cut = weight.reshape(len(weight), -1, 32)
        power = np.floor(np.log2(np.abs(cut).max(-1))).astype(int) - 2
        scale = np.exp2(power).astype(F32)
        codes = np.abs((cut / scale[..., None])[..., None] - E2M1).argmin(-1).astype(np.uint8)
        flat = codes.reshape(weight.shape)
        packed = tensor(flat[:, 0::2] | flat[:, 1::2] << 4)
        found = {f"{module}.weight_packed": packed, f"{module}.weight_scale": tensor((power + 127).astype(np.uint8))}
        return found, (E2M1[codes] * scale[..., None]).reshape(weight.shape)

    group = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return Method(compressed("mxfp4-pack-quantized", group), write)
