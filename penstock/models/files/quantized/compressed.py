"""compressed-tensors: integers packed into words or as they are, 8- and 4-bit floats, 2:4 sparse matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.models.config import Config
from penstock.models.files.quantized.matrix import (
    FLOATS,
    FP8_SCALES,
    PartHeader,
    Parts,
    QuantizedMatrix,
    Shape,
    fits_kernel,
    name_group,
    sort_groups,
)
from penstock.models.files.quantized.sparse import SparseScale, find_sparse
from penstock.quant.bits import mxfp4_scale, unpack_nibbles, unpack_words
from penstock.quant.coded import E4M3, Coded, code_floats

MAX_GROUPS = 1 << 12
MAX_GROUP = 1 << 20
FORMATS = (
    *("dense", "fakequant", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision"),
)
GROUPED = ("group", "tensor_group")
STRATEGIES = ("tensor", "channel", "block", *GROUPED)
FP8 = "float8_e4m3fn"
NVFP4_GROUP, MXFP4_GROUP = 16, 32


@dataclass(frozen=True)
class WeightArgs:
    """One config group's description of its weights."""

    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group: int = 0
    block: tuple[int, int] | None = None
    is_ordered: bool = False  # an input's group is that of weight_g_idx

    @property
    def is_grouped(self) -> bool:
        return self.strategy in GROUPED

    def inputs_per_scale(self, width: int) -> int:
        return self.group if self.is_grouped else width

    def scale_shapes(self, num_out: int, width: int) -> list[Shape]:
        """List the shapes that scales of such a matrix may have; none if its sizes do not divide."""
        if self.strategy == "tensor":
            return [(1,), (), (1, 1)]
        if self.strategy == "channel":
            return [(num_out, 1), (num_out,)]
        if self.block is not None:
            return [(-(-num_out // self.block[0]), -(-width // self.block[1]))]
        return [] if width % self.group else [(num_out, width // self.group)]


def find_compressed(parts: Parts, c: Config) -> list[QuantizedMatrix]:
    """Find the matrices of a folder by their parts' names; the config's groups say what they mean."""
    _read_format(c)
    groups = list(_read_groups(c))
    sparsity = c.section("sparsity_config")
    c.ignore(
        "quantization_status", "global_compression_ratio", "ignore", "version", "kv_cache_scheme", "run_compressed"
    )
    found = find_sparse(parts, sparsity, lambda module, part: _find_sparse_scale(parts, module, part, groups))
    for module, packed in parts.modules("weight_packed"):
        found.append(_find_packed(parts, module, packed, groups))
    for module, weight in parts.modules("weight"):
        if weight.dtype in ("int8", FP8):
            found.append(_find_plain(parts, module, weight, groups))
        else:
            parts.used.discard(weight.name)
    return found


def _read_format(c: Config) -> None:
    if c.values.get("format") == "marlin-24":
        c.refuse("format", "is one GPU kernel's order of weights, which is not read: save the model as pack-quantized")
    c.choice("format", choices={name: name for name in FORMATS}, default="dense")


def _read_groups(c: Config) -> Iterator[WeightArgs]:
    groups = c.section("config_groups")
    if groups is None:
        return
    if len(groups.values) > MAX_GROUPS:
        c.refuse("config_groups", f"has {len(groups.values)} groups: {MAX_GROUPS} are possible")
    for name in groups.values:
        group = groups.section(name)
        if group is None:
            continue
        group.ignore("targets", "input_activations", "output_activations")
        _read_format(group)
        weights = group.section("weights")
        if weights is not None:
            yield _read_weights(weights)


def _read_weights(c: Config) -> WeightArgs:
    bits = c.count("num_bits", default=8, most=8)
    is_float = c.choice("type", choices={"int": False, "float": True}, default="int")
    symmetric = c.flag("symmetric", True)
    size = c.count("group_size", default=-1, least=-1, most=MAX_GROUP)
    usual = "group" if size > 0 else "channel" if c.values.get("group_size") == -1 else "tensor"
    strategy = c.choice("strategy", choices={name: name for name in STRATEGIES}, default=usual)
    if strategy in GROUPED and size < 1:
        c.refuse("group_size", "must be 1 or more where scales belong to groups")
    if strategy == "block" and not is_float:
        c.refuse("strategy", "is read for 8-bit floats only: save integers with strategy group or channel")
    block = _read_block(c) if strategy == "block" else None
    c.only("dynamic", False)
    is_ordered = c.values.get("actorder") in ("group", "dynamic", True)  # else the order was that of calibration alone
    c.only("actorder", "group", "dynamic", "weight", "static", True, False)
    c.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "block_structure")
    return WeightArgs(bits, is_float, symmetric, strategy, size, block, is_ordered)


def _read_block(c: Config) -> tuple[int, int]:
    value = c.values.get("block_structure")
    if isinstance(value, str):
        value = [int(size) if size.isdecimal() and len(size) < 8 else 0 for size in value.split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(type(x) is int and 0 < x <= MAX_GROUP for x in value):
        c.refuse("block_structure", "must be a list of two sizes")
    return value[0], value[1]


def _choose(
    parts: Parts, scale: PartHeader, shape: tuple[int, int], groups: Sequence[WeightArgs], **wanted: Any
) -> WeightArgs:
    """Return the config group whose scales of this matrix have the shape that these have."""
    alike = [args for args in groups if all(getattr(args, name) == value for name, value in wanted.items())]
    for args in alike:
        if scale.shape in args.scale_shapes(*shape):
            return args
    possible = [str(list(s)) for args in alike for s in args.scale_shapes(*shape)[:1]]
    sizes = ", ".join(f"group_size={args.group}" for args in alike if args.group > 0 and shape[1] % args.group)
    why = f"({sizes} does not divide {shape[1]} inputs)" if sizes and not possible else ""
    parts.refuse(
        scale,
        f"has shape {list(scale.shape)}, but config_groups allow {' or '.join(possible) or 'none'} "
        f"for a matrix {list(shape)} {why}".rstrip(),
    )


def _spread_scale(scale: Tensor, num_out: int) -> Tensor:
    """Give each output its scales: [O, G]."""
    return scale.reshape(1, 1).expand(num_out, 1) if scale.numel() == 1 else scale.reshape(num_out, -1)


def _find_packed(parts: Parts, module: str, packed: PartHeader, groups: Sequence[WeightArgs]) -> QuantizedMatrix:
    if packed.dtype == "uint8":
        return _find_fp4(parts, module, packed)
    parts.check(packed, "int32")
    listed = parts.check(parts.need(f"{module}.weight_shape", packed), ("int64", "int32"), (2,), (2, 1))
    num_out, width = (int(size) for size in parts.read(listed).flatten())
    scale = parts.check(parts.need(f"{module}.weight_scale", packed), FLOATS)
    fitting = [
        args
        for args in groups
        if not args.is_float and min(num_out, width) > 0 and packed.shape in _packed_shapes(num_out, width, args.bits)
    ]
    if not fitting:
        bits = " or ".join(sorted({str(args.bits) for args in groups if not args.is_float})) or "no"
        parts.refuse(
            packed, f"has shape {list(packed.shape)}, which is not that of {num_out} × {width} codes of {bits} bits"
        )
    zero = parts.find(f"{module}.weight_zero_point")
    fitting.sort(key=lambda args: args.symmetric != (zero is None))
    args = _choose(parts, scale, (num_out, width), fitting)
    group = args.inputs_per_scale(width)
    if zero is None and not args.symmetric:
        parts.need(f"{module}.weight_zero_point", packed)
    order = _find_order(parts, module, width, packed, args)
    pads = packed.shape != _packed_shapes(num_out, width, args.bits)[0]
    used = [part.name for part in (packed, listed, scale, zero, order) if part is not None]

    def read() -> Coded:
        middle = 1 << (args.bits - 1)
        codes = unpack_words(parts.read(packed), args.bits, width, pads)
        values = _spread_scale(parts.read_scale(scale), num_out)
        zeros = middle if zero is None else _read_zeros(parts, zero, args.bits, (num_out, values.shape[1]))
        coded = Coded(codes, values, group, zeros, args.bits)
        return coded if order is None else _sort(parts, order, coded)

    kind = name_group(args.bits, group, width)
    return QuantizedMatrix(f"{module}.weight", (num_out, width), kind, tuple(used), read, fits_kernel(group, width))


def _read_zeros(parts: Parts, part: PartHeader, bits: int, shape: tuple[int, int]) -> int | Tensor:
    """Read zero points: packed along the outputs, or an int8 for each scale."""
    num_out, count = shape
    middle = 1 << (bits - 1)
    if part.dtype == "int32":
        shapes = _packed_shapes(count, num_out, bits)
        parts.check(part, "int32", *(shape[::-1] for shape in shapes))
        zeros = unpack_words(parts.read(part).t(), bits, num_out, part.shape != shapes[0][::-1]).t().int()
    else:
        parts.check(part, ("int8", "uint8"), shape, (num_out,), (1,), (), (1, 1))
        stored = parts.read(part).int()
        zeros = parts.check_range(part, stored + (middle if part.dtype == "int8" else 0), 2 * middle)
        zeros = zeros.reshape(1, 1).expand(shape) if zeros.numel() == 1 else zeros.reshape(num_out, -1)
        if zeros.shape[1] != count:
            zeros = zeros.expand(shape)
    return middle if bool((zeros == middle).all()) else zeros.to(torch.uint8).contiguous()


def _packed_shapes(num_rows: int, count: int, bits: int) -> list[tuple[int, int]]:
    """List the shapes that rows of so many codes may take: dense, or as older writers pack them, a code within one
    word."""
    return [(num_rows, -(-count * bits // 32)), (num_rows, -(-count // (32 // bits)))]


def _find_order(parts: Parts, module: str, width: int, of: PartHeader, args: WeightArgs) -> PartHeader | None:
    order = parts.find(f"{module}.weight_g_idx")
    if order is None and args.is_ordered and args.inputs_per_scale(width) < width:
        parts.need(f"{module}.weight_g_idx", of)
    return None if order is None else parts.check(order, ("int32", "int64"), (width,))


def _sort(parts: Parts, part: PartHeader, coded: Coded) -> Coded:
    groups = parts.read(part)
    if bool((groups == -1).all()):  # not used
        return coded
    parts.check_range(part, groups, coded.scale.shape[1])
    order, irregular = sort_groups(groups, coded.group)
    codes = coded.codes if order is None else coded.codes[:, order]
    return replace(coded, codes=codes, order=order, groups=irregular)


def _find_fp4(parts: Parts, module: str, packed: PartHeader) -> QuantizedMatrix:
    """Read NVFP4, or MXFP4 where scales are exponents."""
    num_out, half = parts.check_matrix(packed)
    width = 2 * half
    scale = parts.check(parts.need(f"{module}.weight_scale", packed), (FP8, "uint8"))
    is_mx = scale.dtype == "uint8"
    parts.check(scale, scale.dtype, (num_out, width // (MXFP4_GROUP if is_mx else NVFP4_GROUP)))
    if width % (MXFP4_GROUP if is_mx else NVFP4_GROUP):
        parts.refuse(packed, f"has rows of {width} values, which are not whole groups")
    name, shape = f"{module}.weight", (num_out, width)
    if is_mx:

        def read_mx() -> Coded:
            codes = unpack_nibbles(parts.read(packed))
            return Coded(codes, mxfp4_scale(parts.read_scale(scale), codes), MXFP4_GROUP, bits=4, levels="FP4")

        return QuantizedMatrix(name, shape, "mxfp4", (packed.name, scale.name), read_mx)
    divisor = parts.check(parts.need(f"{module}.weight_global_scale", packed), "float32", (1,), ())
    used = (packed.name, scale.name, divisor.name)

    def read_nv() -> Coded:
        divided_by = parts.read_scale(divisor).reshape(1, 1)
        if not bool(divided_by.any()):
            parts.refuse(divisor, "is 0, and scales are divided by it")
        scales = parts.read_scale(scale).float() / divided_by
        return Coded(unpack_nibbles(parts.read(packed)), scales / 2, NVFP4_GROUP, bits=4, levels="FP4")

    return QuantizedMatrix(name, shape, "nvfp4", used, read_nv, width % MXFP4_GROUP == 0)


def _find_plain(parts: Parts, module: str, weight: PartHeader, groups: Sequence[WeightArgs]) -> QuantizedMatrix:
    """Read int8 or 8-bit floats as they are, one to a value."""
    shape = parts.check_matrix(weight)
    is_float = weight.dtype == FP8
    scale = parts.check(parts.need(f"{module}.weight_scale", weight), FP8_SCALES if is_float else FLOATS)
    args = _choose(parts, scale, shape, groups, is_float=is_float)
    zero = parts.find(f"{module}.weight_zero_point")
    order = None if is_float else _find_order(parts, module, shape[1], weight, args)
    used = tuple(part.name for part in (weight, scale, zero, order) if part is not None)
    if is_float:
        read_floats = _read_float(parts, weight, scale, zero, args)
        size = args.group if args.is_grouped else args.block[1] if args.block else 0
        return QuantizedMatrix(weight.name, shape, "fp8", used, read_floats, False, True, size)
    group = args.inputs_per_scale(shape[1])
    middle = 128

    def read_int() -> Coded:
        codes = parts.read(weight).view(torch.uint8) ^ middle
        values = _spread_scale(parts.read_scale(scale), shape[0])
        zeros = middle if zero is None else _read_zeros(parts, zero, 8, (shape[0], values.shape[1]))
        coded = Coded(codes, values, group, zeros)
        return coded if order is None else _sort(parts, order, coded)

    kind = name_group(8, group, shape[1])
    return QuantizedMatrix(weight.name, shape, kind, used, read_int, fits_kernel(group, shape[1]))


def _read_float(
    parts: Parts, weight: PartHeader, scale: PartHeader, zero: PartHeader | None, args: WeightArgs
) -> Callable[[], Coded]:
    def read() -> Coded:
        if zero is not None and bool(parts.read(zero).float().any()):
            parts.refuse(zero, "holds zero points, which 8-bit floats do not have")
        scales = parts.read_scale(scale)
        if args.is_grouped:
            codes = parts.read(weight).view(torch.uint8)
            return Coded(codes, scales.float(), args.group, levels=E4M3)
        return code_floats(parts.read(weight), scales, args.block)

    return read


def _find_sparse_scale(parts: Parts, module: str, part: PartHeader, groups: Sequence[WeightArgs]) -> SparseScale:
    shape = part.shape[0], 2 * part.shape[1]
    scale = parts.check(parts.need(f"{module}.weight_scale", part), FLOATS)
    args = _choose(parts, scale, shape, groups, is_float=part.dtype == FP8)
    if args.is_float and args.is_grouped:
        parts.refuse(scale, "belongs to groups of sparse 8-bit floats, which are not read")
    return SparseScale(scale, args.inputs_per_scale(shape[1]), args.block)
