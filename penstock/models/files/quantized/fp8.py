"""8-bit floats (`fp8`, `fbgemm_fp8`) with a scale for a matrix, an output or a block, and MXFP4 stacks of experts."""

from __future__ import annotations

from penstock.models.config import Config
from penstock.models.files.quantized.matrix import FP8_SCALES, PartHeader, Parts, QuantizedMatrix, Shape
from penstock.quant.bits import mxfp4_scale, unpack_nibbles
from penstock.quant.coded import Coded, code_floats

FP8 = "float8_e4m3fn"
MAX_BLOCK = 1 << 16
GROUP = 32  # values of an MXFP4 scale


def find_fp8(parts: Parts, c: Config) -> list[QuantizedMatrix]:
    c.choice("activation_scheme", choices={"dynamic": 0, "static": 0}, default="dynamic")
    c.only("fmt", "e4m3", "float8_e4m3fn")
    c.only("scale_fmt", "float", "ue8m0")
    c.only("expert_dtype", "fp8")
    c.only("weight_per_tensor", True, False)
    c.only("act_per_tensor", True, False)
    c.ignore(
        "modules_to_not_convert",
        "modules_to_convert",
        "ignored_layers",
        "dequantize",
        "kv_cache_scheme",
        "weight_block_size",
    )
    block = _read_block(c)
    return _find_all(parts, block)


def find_fbgemm(parts: Parts, c: Config) -> list[QuantizedMatrix]:
    c.ignore("activation_scale_ub", "modules_to_not_convert")
    return _find_all(parts, None)


def _read_block(c: Config) -> tuple[int, int] | None:
    value = c.values.get("weight_block_size")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(x) is int and 0 < x <= MAX_BLOCK for x in value):
        c.refuse("weight_block_size", f"must be a list of two sizes from 1 to {MAX_BLOCK}")
    return value[0], value[1]


def _find_all(parts: Parts, block: tuple[int, int] | None) -> list[QuantizedMatrix]:
    found = []
    for module, weight in parts.modules("weight"):
        if weight.dtype == FP8:
            found.append(_find(parts, module, weight, block))
        else:
            parts.used.discard(weight.name)
    return found


def _find(parts: Parts, module: str, weight: PartHeader, block: tuple[int, int] | None) -> QuantizedMatrix:
    num_out, width = parts.check_matrix(weight)
    scale = parts.find(f"{module}.weight_scale_inv") or parts.need(f"{module}.weight_scale", weight)
    shapes: list[Shape] = [(), (1,), (1, 1), (num_out, 1), (num_out,)]
    blocks = None if block is None else (-(-num_out // block[0]), -(-width // block[1]))
    parts.check(scale, FP8_SCALES, *([blocks] if blocks else shapes))

    def read() -> Coded:
        return code_floats(parts.read(weight), parts.read_scale(scale), block)

    used, group = (weight.name, scale.name), block[1] if blocks and block else 0
    return QuantizedMatrix(weight.name, (num_out, width), "fp8", used, read, False, True, group)


def find_mxfp4(parts: Parts, c: Config) -> list[QuantizedMatrix]:
    """Find stacks of experts: `*_blocks` [E, O, C/32, 16] with `*_scales` [E, O, C/32], exponents of two."""
    c.ignore("modules_to_not_convert", "dequantize")
    found = []
    for name in parts.file.names():
        if name.endswith("_blocks"):
            found.append(_find_stack(parts, parts.take(name), name.removesuffix("_blocks")))
    return found


def _find_stack(parts: Parts, blocks: PartHeader, name: str) -> QuantizedMatrix:
    parts.check(blocks, "uint8")
    if len(blocks.shape) != 4 or 0 in blocks.shape or blocks.shape[3] != GROUP // 2:
        parts.refuse(
            blocks, f"has shape {list(blocks.shape)}, where [experts, outputs, groups, {GROUP // 2}] is needed"
        )
    experts, num_out, num_groups, _ = blocks.shape
    scales = parts.check(parts.need(f"{name}_scales", blocks), "uint8", blocks.shape[:3])

    def read() -> Coded:
        codes = unpack_nibbles(parts.read(blocks).flatten(2)).flatten(0, 1)
        scale = mxfp4_scale(parts.read(scales).flatten(0, 1), codes)
        return Coded(codes, scale, GROUP, bits=4, levels="FP4", transposed=True)

    shape = experts, GROUP * num_groups, num_out  # as transformers has it: inputs before outputs
    return QuantizedMatrix(name, shape, "mxfp4", (blocks.name, scales.name), read)
