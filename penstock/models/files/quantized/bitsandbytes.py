"""bitsandbytes: NF4 and FP4 with a scale for each block, itself maybe in 8 bits, and int8 with a scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from penstock.models.config import Config
from penstock.models.files.json_file import Damaged, parse_object
from penstock.models.files.quantized.matrix import FLOATS, PartHeader, Parts, QuantizedMatrix, fits_kernel
from penstock.ops.matmul.levels import FLOAT_LEVELS
from penstock.quant.bits import unpack_nibbles
from penstock.quant.coded import Coded

STATE = "quant_state.bitsandbytes__"
TABLES = {"nf4": "NF4", "fp4": "BNB_FP4"}
MAX_BLOCK = 1 << 16
MAX_STATE_BYTES = 1 << 16
TABLE_ERROR = 1e-6
INT8_STEP = 7.874015718698502e-3  # 1/127, as its authors write it


def find_bitsandbytes(parts: Parts, c: Config) -> list[QuantizedMatrix]:
    c.only("bnb_4bit_quant_type", "nf4", "fp4")
    c.ignore(
        *("load_in_4bit", "_load_in_4bit", "load_in_8bit", "_load_in_8bit", "bnb_4bit_compute_dtype"),
        *("bnb_4bit_quant_storage", "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload"),
        *("llm_int8_has_fp16_weight", "llm_int8_skip_modules", "llm_int8_threshold", "skip_modules"),
    )
    found = [_find_int8(parts, module, scale) for module, scale in parts.modules("SCB")]
    for name in parts.file.names():
        weight, separator, kind = name.rpartition(f".{STATE}")
        if separator:
            found.append(_find_4bit(parts, parts.take(name), weight, kind))
    return found


def _find_int8(parts: Parts, module: str, scale: PartHeader) -> QuantizedMatrix:
    weight = parts.check(parts.need(f"{module}.weight", scale), "int8")
    num_out, width = parts.check_matrix(weight)
    parts.check(scale, FLOATS, (num_out,))
    layout = parts.find(f"{module}.weight_format")
    if layout is not None and bool(parts.read(parts.check(layout, "uint8")).any()):
        parts.refuse(layout, "says that the weight is in a GPU's order of tiles, where rows are needed")

    def read() -> Coded:
        scales = (parts.read_scale(scale).float() * INT8_STEP).reshape(-1, 1)
        return Coded(parts.read(weight).view(torch.uint8) ^ 128, scales, width, 128)

    used = tuple(part.name for part in (weight, scale, layout) if part is not None)
    return QuantizedMatrix(weight.name, (num_out, width), "int8", used, read)


def _read_state(parts: Parts, part: PartHeader) -> Mapping[str, Any]:
    parts.check(part, "uint8")
    if len(part.shape) != 1 or part.shape[0] > MAX_STATE_BYTES:
        parts.refuse(part, f"has shape {list(part.shape)}, where up to {MAX_STATE_BYTES} bytes of JSON are needed")
    try:
        return parse_object(parts.read(part).numpy().tobytes())
    except Damaged as error:
        parts.refuse(part, f"is damaged: {error}")


def _find_4bit(parts: Parts, part: PartHeader, name: str, kind: str) -> QuantizedMatrix:
    state = _read_state(parts, part)
    if kind not in TABLES or state.get("quant_type") != kind:
        parts.refuse(
            part, f"says quant_type={state.get('quant_type')!r}, where {' or '.join(TABLES)} as in its name is needed"
        )
    shape, block = state.get("shape"), state.get("blocksize")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(x) is int and 0 < x < 1 << 31 for x in shape):
        parts.refuse(part, f"says shape={shape!r}, where two sizes are needed")
    if type(block) is not int or not 2 <= block <= MAX_BLOCK or block % 2:
        parts.refuse(part, f"says blocksize={block!r}, where an even number up to {MAX_BLOCK} is needed")
    num_out, width = shape
    packed = parts.need(name, part)
    itemsize = {"uint8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4}.get(packed.dtype, 0)
    if prod(packed.shape) * itemsize != -(-num_out * width // 2):
        parts.refuse(
            packed, f"of shape {list(packed.shape)} and {packed.dtype} does not hold {num_out} × {width} codes"
        )
    num_blocks = -(-num_out * width // block)
    scale = _Scale(parts, part, name, state, num_blocks)
    table = parts.check(parts.need(f"{name}.quant_map", part), "float32", (16,))

    def read() -> Coded | Tensor:
        if bool((parts.read(table) - torch.tensor(FLOAT_LEVELS[TABLES[kind]])).abs().max() > TABLE_ERROR):
            parts.refuse(table, f"is not the table of {kind}")
        codes = unpack_nibbles(parts.read(packed).contiguous().view(torch.uint8).flatten(), high_first=True)
        codes, scales = codes[: num_out * width], scale.read()
        if width % block == 0:
            return Coded(codes.view(num_out, width), scales.view(num_out, -1), block, bits=4, levels=TABLES[kind])
        levels = torch.tensor(FLOAT_LEVELS[TABLES[kind]], dtype=torch.float32)
        values = levels[codes.long()] * scales.repeat_interleave(block)[: len(codes)]
        return values.view(num_out, width)

    packs = width % block == 0 and fits_kernel(block, width)
    used = (packed.name, part.name, table.name, *scale.names)
    return QuantizedMatrix(name, (num_out, width), kind, used, read, is_packed=packs)


class _Scale:
    """The scales of a matrix's blocks: floats, or codes of a table with scales of their own."""

    def __init__(self, parts: Parts, part: PartHeader, name: str, state: Mapping[str, Any], num_blocks: int) -> None:
        self.parts, self.num_blocks = parts, num_blocks
        self.absmax = parts.need(f"{name}.absmax", part)
        self.nested = parts.find(f"{name}.nested_absmax")
        self.names = [self.absmax.name]
        if self.nested is None:
            parts.check(self.absmax, "float32", (num_blocks,))
            return
        size, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if type(size) is not int or not 0 < size <= MAX_BLOCK or not isinstance(offset, (int, float)):
            parts.refuse(part, f"says nested_blocksize={size!r} and nested_offset={offset!r}, where numbers are needed")
        self.size, self.offset = size, float(offset)
        parts.check(self.absmax, "uint8", (num_blocks,))
        parts.check(self.nested, "float32", (-(-num_blocks // size),))
        self.table = parts.check(parts.need(f"{name}.nested_quant_map", part), "float32", (256,))
        self.names += [self.nested.name, self.table.name]

    def read(self) -> Tensor:
        absmax = self.parts.read_scale(self.absmax)
        if self.nested is None:
            return absmax
        outer = self.parts.read_scale(self.nested).repeat_interleave(self.size)[: self.num_blocks]
        return self.parts.read(self.table)[absmax.long()] * outer + self.offset
