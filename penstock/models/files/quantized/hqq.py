"""HQQ as transformers saves it: codes packed from both ends of a tensor, scales and fractional zeros for each group."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.models.config import Config
from penstock.models.files.quantized.matrix import FLOATS, PartHeader, Parts, QuantizedMatrix, fits_kernel, name_group
from penstock.quant.coded import Coded

MAX_GROUP = 1 << 20
PACKINGS = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}
NUMBERS = ("nbits", "group_size", "axis", "view_as_float", "quant_scale", "quant_zero")
OTHERS = (
    *("packing", "unpack_view_dtype", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config"),
    *("channel_wise", "optimize", "round_zero"),
)


def find_hqq(parts: Parts, c: Config) -> list[QuantizedMatrix]:
    """Find matrices by `W_q`; each has its own settings beside it."""
    c.ignore("quant_config", "skip_modules", "dynamic_config")
    return [_find(parts, module, codes) for module, codes in parts.modules("W_q")]


def _find(parts: Parts, module: str, packed: PartHeader) -> QuantizedMatrix:
    for name in OTHERS:
        parts.find(f"{module}.{name}")
    settings = {name: _read_number(parts, module, name, packed) for name in NUMBERS}
    if settings["quant_scale"] or settings["quant_zero"] or settings["view_as_float"]:
        parts.refuse(
            packed,
            "has scales that are quantized too, or codes viewed as floats: save it with quant_scale=False, "
            "quant_zero=False and view_as_float=False",
        )
    listed = parts.check(parts.need(f"{module}.shape", packed), ("int64", "int32"), (2,))
    num_out, width = (int(size) for size in parts.read(listed))
    bits, axis = settings["nbits"], settings["axis"]
    group = settings["group_size"] or (width if axis == 1 else num_out)
    if min(num_out, width) < 1 or axis not in (0, 1) or not 0 < group <= MAX_GROUP or num_out * width % group:
        parts.refuse(
            listed, f"and group_size={group}, axis={axis} do not divide a matrix {[num_out, width]} into groups"
        )
    if bits not in PACKINGS.values():
        parts.refuse(packed, f"has codes of nbits={bits}, where {sorted(PACKINGS.values())} are possible")
    count = num_out * width // group
    rows, columns = (count, group) if axis == 1 else (group, count)
    fields = 10 if bits == 3 else 8 // bits
    parts.check(packed, "int32" if bits == 3 else "uint8", (-(-rows // fields), columns))
    entries = (count, 1) if axis == 1 else (1, count)
    scale = parts.check(parts.need(f"{module}.scale", packed), FLOATS, entries)
    zero = parts.check(parts.need(f"{module}.zero", packed), FLOATS, entries)

    whole = axis == 1 and width % group == 0  # an output has groups of its own

    def read() -> Coded | Tensor:
        codes = _unpack(parts.read(packed), bits, fields)[:rows]
        zeros, scales = parts.read(zero).float(), parts.read_scale(scale)
        if not whole:
            return ((codes.float() - zeros) * scales.float()).reshape(num_out, width)
        scales, zeros = scales.view(num_out, -1), zeros.view(num_out, -1)
        return Coded(codes.to(torch.uint8).view(num_out, width), scales, group, zeros, bits)

    kind = name_group(bits, group, width)
    used = (packed.name, scale.name, zero.name, listed.name)
    packs = whole and bits <= 4 and fits_kernel(group, width)
    return QuantizedMatrix(f"{module}.weight", (num_out, width), kind, used, read, packs, not packs)


def _read_number(parts: Parts, module: str, name: str, of: PartHeader) -> int:
    part = parts.find(f"{module}.{name}")
    if part is None and name in ("nbits", "axis"):
        parts.need(f"{module}.{name}", of)
    if part is None:
        return 0
    parts.check(part, ("int32", "int64", "uint8", "bool"), (), (1,))
    return int(parts.read(part))


def _unpack(stored: Tensor, bits: int, fields: int) -> Tensor:
    """Unpack [R, K] to [fields · R, K]: the highest bits are the first R rows."""
    return torch.cat([stored >> bits * (fields - 1 - at) & (1 << bits) - 1 for at in range(fields)])
