"""Loading: which tensor is which parameter, how it is laid out, and the finished model.

Everything is checked by name and shape before the first tensor is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import InvalidConfig, InvalidModel
from penstock.models import reading
from penstock.models.cut import Cut, Cuts
from penstock.models.decoder import CPU, Build, Decoder, Encoder, Finisher, dense, store_fp8
from penstock.models.files.checkpoint import Checkpoint
from penstock.models.files.quantized.checkpoint import is_float8, keep_floats, requantize_floats
from penstock.models.layer import Merge, Shape
from penstock.models.names import IGNORED, Layout, take_number
from penstock.models.pooling import Pooling, pooling_from_gguf, read_pooling
from penstock.models.reading import (
    STACKS,
    STORED,
    Source,
    Sources,
    Take,
    find_codes,
    find_spill,
    from_checkpoint,
    read_cut_blocks,
)
from penstock.models.spec import ModelSpec
from penstock.ops import OpTable, cpu
from penstock.ops.matmul.packed import GROUP
from penstock.quant.coded import Coded
from penstock.quant.fp8 import keep_fp8
from penstock.quant.ints import QUANTIZERS, quantize, round_to_ints
from penstock.quant.mapped import spill
from penstock.quant.packed import Packed
from penstock.quant.permuted import pack_in_order
from penstock.quant.recoded import Codes, recode_matrices
from penstock.quant.scheme import Scheme

Hold = Callable[[str, Tensor | None], Scheme]
Progress = Callable[[int, int], None]  # values loaded so far, values in all

MIN_QUANTIZED_WIDTH = 32  # inputs; a narrower matrix gains nothing
OUTER = ("head.", "embedding.")
ROUTING = (".mlp.router.weight", ".mlp.shared_gate.weight")  # small, and an error changes which experts run
ABSORBED = ".attention.kv_b.weight"  # multiplied head by head, one half of it transposed
KEPT_WIDE = (*ROUTING, ABSORBED)  # matrices that no quantization rounds
FP8_CAPABILITY = (8, 9)  # of GPUs that multiply 8-bit floats
PACKED = "packed"  # a GPU's quantization: quantized matrices keep their codes


def _find_tensors(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, tuple[str, Layout]]:
    """Map our name of each tensor to its name in the checkpoint and its layout."""
    found: dict[str, tuple[str, Layout]] = {}
    tied = spec.head is not None and spec.head.tied
    for tensor in checkpoint.names():
        stored = spec.names.find(tensor)
        if stored is None:
            raise InvalidModel(
                f"{checkpoint.path}: tensor {tensor!r} is unknown to {spec.architecture}: "
                "the file is damaged or of another kind of model"
            )
        if stored is IGNORED or (tied and stored.name == "head.rows.weight"):
            continue
        if stored.name in found:
            raise InvalidModel(
                f"{checkpoint.path}: tensors {found[stored.name][0]!r} and {tensor!r} are the same "
                "parameter: remove one of them"
            )
        found[stored.name] = tensor, stored.layout
    return found


def _parts(
    parameter: str, shape: Shape, merge: Merge | None, tensors: dict[str, tuple[str, Layout]]
) -> list[tuple[str, Shape]]:
    """Return the names under which a parameter may be stored, whole or in parts, with their shapes."""
    if merge is None or _locate(parameter, shape, tensors)[0] in tensors:
        return [(parameter, shape)]
    module, _, suffix = parameter.rpartition(".")
    above = module.rpartition(".")[0]
    return [(f"{above}.{part}.{suffix}", (rows, *shape[1:])) for part, rows in merge.parts]


def _locate(name: str, shape: Shape, tensors: dict[str, tuple[str, Layout]]) -> tuple[str, range | None]:
    """Find where a parameter or part is stored: under its own name, or as rows of a stack."""
    layer, number, inner = name.split(".", 2) if name.count(".") > 2 else ("", "", "")
    starred = take_number(inner)
    if name in tensors or layer != "layers" or starred is None:
        return name, None
    index = starred[1]
    return f"layers.{number}.{starred[0]}", range(index * shape[0], (index + 1) * shape[0])


def match(checkpoint: Checkpoint, spec: ModelSpec) -> Sources:
    """Find the sources of every parameter; check that all tensors are used and all shapes are right."""
    found, merges, used = _find_tensors(checkpoint, spec), spec.merges(), Counter[str]()
    sources: Sources = {}
    for parameter, shape in spec.parameters().items():
        merge = merges.get(parameter.rpartition(".")[0])
        sources[parameter] = []
        for name, part_shape in _parts(parameter, shape, merge, found):
            key, rows = _locate(name, part_shape, found)
            if key not in found:
                raise InvalidModel(
                    f"{checkpoint.path}: tensor {spec.names.spelling(name)!r} of shape {list(part_shape)} is missing"
                )
            tensor, layout = found[key]
            head_size, kv_rows = (merge.head_size, merge.parts[1][1]) if merge and merge.head_size else (0, 0)
            source = Source(tensor, layout, part_shape, head_size, kv_rows, rows, merge.num_matrices if merge else 1)
            _check(checkpoint, source)
            sources[parameter].append(source)
            used[key] += prod(part_shape)
    for name, (tensor, _) in found.items():
        if name not in used and _adds_nothing(checkpoint, name, tensor, used):
            continue
        if name not in used or used[name] != prod(checkpoint.shape(tensor)):
            raise InvalidModel(
                f"{checkpoint.path}: tensor {tensor!r} has no place in the model that its config "
                f"describes ({spec.num_layers} layers): config and weights do not belong together"
            )
    return sources


def _adds_nothing(checkpoint: Checkpoint, name: str, tensor: str, used: Container[str]) -> bool:
    """Return True for a bias of zeros beside a matrix of the model: some GPTQ writers give one to every linear."""
    module, _, kind = name.rpartition(".")
    is_bias = kind == "bias" and f"{module}.weight" in used and len(checkpoint.shape(tensor)) == 1
    return is_bias and not bool(checkpoint.tensor(tensor).any())


def _check(checkpoint: Checkpoint, source: Source) -> None:
    shape, expected = tuple(checkpoint.shape(source.tensor)), source.shape
    if source.layout == "transposed":
        expected = expected[::-1]
    if source.layout in STACKS:
        inner = (expected[0] // source.num_matrices, *expected[1:])
        expected = (source.num_matrices, *(inner[::-1] if source.layout.endswith("transposed") else inner))
    if source.rows is not None:
        count = source.rows.stop // len(source.rows)
        expected = (max((count, *shape[:1])), *expected)
    if shape != expected:
        raise InvalidModel(
            f"{checkpoint.path}: tensor {source.tensor!r} has shape {list(shape)}, but its config says {list(expected)}"
        )


def move(take: Take, device: torch.device) -> Take:
    """Move what `take` returns to the device."""
    return take if device.type == "cpu" else lambda name: take(name).to(device)


@dataclass(frozen=True)
class Options:
    """The storage of weights: dtype, quantization, rounding of activations."""

    dtype: torch.dtype | None = torch.float32  # of matrices; None: as stored, quantized ones packed
    quantization: str | None = None  # "int8" or "int4": pack what the checkpoint holds unquantized
    rounded: bool = True  # packed weights meet activations rounded to 8 bits
    on_gpu: bool = False
    device: torch.device = CPU
    spills_to: Path | None = None  # the folder for experts that do not fit in memory
    has_fp8: bool = False  # the GPU multiplies 8-bit floats

    @property
    def keeps_codes(self) -> bool:
        """A GPU keeps the integers of quantized matrices."""
        return self.on_gpu and self.quantization == PACKED

    @property
    def keeps_floats(self) -> bool:
        """A GPU keeps the 8-bit floats of quantized matrices."""
        return self.on_gpu and self.has_fp8 and self.quantization in (PACKED, "fp8")

    @property
    def rounds_floats(self) -> bool:
        """A CPU multiplies 8-bit floats as integers."""
        return not self.on_gpu and self.rounded and self.dtype is None

    def x_bits(self, name: str) -> int:
        """The logits show every error of the last product, so its activations are rounded less."""
        return 0 if not self.rounded else 16 if name.startswith(OUTER) else 8

    def find_kind(self, name: str, num_in: int) -> str | None:
        """Return what a matrix of real numbers is quantized to; None if it stays as it is. Head and embedding are held
        in 8 bits at least: logits show every error of the last product, and an embedding is read a row at a time."""
        if self.quantization not in QUANTIZERS or num_in < MIN_QUANTIZED_WIDTH or name.endswith(ROUTING):
            return None
        return "int8" if name.startswith(OUTER) else self.quantization

    def require_whole_groups(self, name: str, cut: Cut | None) -> None:
        """A rank's columns must be quantized as they would be in the whole matrix."""
        if cut is None or cut.columns is None or self.find_kind(name, MIN_QUANTIZED_WIDTH) is None:
            return
        if cut.columns.start % GROUP or cut.columns.stop % GROUP:
            raise InvalidConfig(
                f"quantization={self.quantization} rounds {GROUP} inputs together, which ranks with "
                f"{len(cut.columns)} inputs cut apart: cut the model by outputs, or use fewer ranks"
            )


def storage(
    ops: OpTable,
    take: Take,
    options: Options,
    checkpoint: Checkpoint | None,
    sources: Sources,
    cuts: Cuts | None = None,
) -> Hold:
    """Return the function that stores each matrix: packed as the file has it, quantized at load, or dense."""

    def find_cut(name: str) -> Cut | None:
        return cuts.parameters.get(name) if cuts else None

    def count_matrices(name: str) -> int:
        return cuts.num_matrices.get(name, 1) if cuts else sources[name][0].num_matrices

    def pack_blocks(name: str, bias: Tensor | None) -> Scheme | None:
        if checkpoint is None or cpu.path() == "reference":
            return None
        if options.device.type == "meta":
            return _outline(ops, find_codes(checkpoint, sources[name]), take(name), bias, options)
        num_matrices = count_matrices(name)
        keeps_floats = options.keeps_floats and any(is_float8(checkpoint, part.tensor) for part in sources[name])
        if not (options.keeps_codes or keeps_floats) and (options.on_gpu or options.dtype is not None):
            return None
        stored = read_cut_blocks(checkpoint, sources[name], find_cut(name))
        if not stored:
            return None
        if keeps_floats:
            return keep_fp8(ops, stored, bias, options.device)
        if options.on_gpu:
            if num_matrices > 1 and any(isinstance(part, Coded) and part.order is not None for part in stored):
                return None
            return recode_matrices(ops, stored, bias, options.dtype or torch.bfloat16, options.device)
        if num_matrices > 1:
            return Packed.from_stacks(ops, stored, num_matrices, bias, options.x_bits(name))
        x_bits = options.x_bits(name)
        return pack_in_order(ops, stored, bias, lambda run, bias: Packed.from_stored(ops, run, bias, x_bits))

    def hold(name: str, bias: Tensor | None) -> Scheme:
        scheme = store(name, bias)
        if options.spills_to is not None and count_matrices(name) > 1:
            spill(scheme, options.spills_to)
        return scheme

    def store(name: str, bias: Tensor | None) -> Scheme:
        scheme = pack_blocks(name, bias)
        if scheme is not None:
            return scheme
        options.require_whole_groups(name, find_cut(name))
        weight = take(name)
        if (kind := options.find_kind(name, weight.shape[1])) is not None:
            if options.on_gpu:
                return round_to_ints(ops, weight, bias, kind, options.dtype or torch.bfloat16)
            return Packed.from_stored(ops, [quantize(weight, kind)], bias, options.x_bits(name))
        return dense(ops, weight.to(options.dtype) if options.on_gpu and options.dtype else weight, bias)

    return hold


def _outline(ops: OpTable, codes: Codes | None, matrix: Tensor, bias: Tensor | None, options: Options) -> Scheme | None:
    """Make a matrix without values on the meta device, as a GPU would keep it; None if it is widened."""
    if codes is None or not (options.keeps_codes or codes.group and options.quantization == "fp8"):
        return None
    num_out, width = matrix.shape
    return codes.make_blank(ops, num_out, width, bias, options.dtype or torch.bfloat16, options.device)


def has_fp8(device: torch.device) -> bool:
    """Return True if a GPU multiplies 8-bit floats."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def read_as(checkpoint: Checkpoint | None, options: Options) -> Checkpoint | None:
    """Return the checkpoint with 8-bit floats as the device multiplies them."""
    if checkpoint is not None and options.keeps_floats:
        return keep_floats(checkpoint)
    return requantize_floats(checkpoint) if options.rounds_floats else checkpoint


def _report_progress(take: Take, hold: Hold, spec: ModelSpec, progress: Progress) -> tuple[Take, Hold]:
    """Wrap `take` and `hold` so that `progress` is called after each parameter."""
    shapes = {name: shape for name, shape in spec.parameters().items() if spec.holds(name)}
    total, done = sum(map(prod, shapes.values())), 0

    def report(name: str) -> None:
        nonlocal done
        done += prod(shapes[name])
        progress(done, total)

    def take_and_report(name: str) -> Tensor:
        tensor = take(name)
        report(name)
        return tensor

    def hold_and_report(name: str, bias: Tensor | None) -> Scheme:
        scheme = hold(name, bias)
        report(name)
        return scheme

    return take_and_report, hold_and_report


def load_model(
    checkpoint: Checkpoint | None,
    spec: ModelSpec,
    *,
    dtype: torch.dtype | None = torch.float32,
    quantization: str | None = None,
    rounded: bool = True,
    dummy_seed: int | None = None,
    progress: Progress | None = None,
    device: torch.device = CPU,
    finish: Finisher | None = None,
) -> Decoder | Encoder:
    """Load the model of `spec` with a checkpoint's weights, or with random ones of `dummy_seed`, onto the device.

    It is plain unless `finish` changes its blocks, each before the next is read; it then calls the ops of `finish`.
    Of a pipeline stage only its part is read.
    On the meta device there are no values, but matrices are stored as the checkpoint's headers say.

    Matrices are held in `dtype`: float32, bfloat16 or float16; None keeps a checkpoint's own, quantized ones packed.
    """
    if dtype is not None and dtype not in STORED:
        raise InvalidModel(f"dtype={dtype} cannot hold weights: use float32, bfloat16 or float16")
    if quantization and device.type == "cpu" and cpu.path() == "reference":
        raise InvalidConfig(
            f"quantization={quantization} needs the compiled kernels: install Penstock with a "
            "compiler, and leave PENSTOCK_CPU unset"
        )
    pooling, sources, cuts = Pooling(), Sources(), spec.cuts
    # A GPU's integers are made of what the checkpoint holds, as a CPU's are, not of that rounded to 16 bits first.
    kept = None if device.type == "cuda" and quantization in QUANTIZERS else dtype
    if dummy_seed is not None:
        take, take_kept = (reading.from_seed(spec, dummy_seed, each, device) for each in (dtype, kept))
        checkpoint = checkpoint if device.type == "meta" else None
        sources = match(checkpoint, spec) if checkpoint else sources
    elif checkpoint is None:
        raise InvalidModel("no checkpoint to load from: name a model folder or a .gguf file, or ask for dummy weights")
    else:
        sources = match(checkpoint, cuts.whole if cuts else spec)
        read = (from_checkpoint(checkpoint, sources, each, cuts) for each in (dtype, kept))
        take, take_kept = (move(each, device) for each in read)
        if spec.is_encoder:
            source = checkpoint.tokenizer_source()
            pooling = pooling_from_gguf(source) if isinstance(source, Mapping) else read_pooling(checkpoint.path)
    ops = finish.ops if finish else OpTable("cpu" if device.type == "cpu" else "cuda")
    on_cpu = device.type == "cpu"
    options = Options(dtype, quantization, rounded, not on_cpu, device, None, has_fp8(device))
    if on_cpu and checkpoint is not None:
        options = replace(options, spills_to=find_spill(checkpoint, spec, sources, options))
    hold = storage(ops, take_kept, options, read_as(checkpoint, options), sources, cuts)
    if progress:
        take, hold = _report_progress(take, hold, spec, progress)
    try:
        then = store_fp8 if quantization == "fp8" and finish is None else finish
        return Build(spec, ops, take, hold, device, then).model(pooling)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise InvalidModel(
            f"the model's {spec.num_parameters} values do not fit in memory: use a smaller model or a 16-bit dtype"
        ) from None
