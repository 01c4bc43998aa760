"""Parameters out of a checkpoint's tensors: laid out our way, whole or as one rank's part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.errors import InvalidConfig, InvalidModel
from penstock.host.machine import free_memory_bytes
from penstock.models.cut import Cut, Cuts
from penstock.models.files.checkpoint import Checkpoint
from penstock.models.files.quantized.checkpoint import QuantizedCheckpoint
from penstock.models.layer import Shape, Shapes
from penstock.models.names import Layout
from penstock.models.spec import ModelSpec
from penstock.quant.ints import BLOCK, QUANTIZERS
from penstock.quant.mapped import find_folder
from penstock.quant.packed import Stored
from penstock.quant.recoded import Codes

if TYPE_CHECKING:
    from penstock.models.load import Options

Take = Callable[[str], Tensor]

STORED = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
SPILLING_SHARE = 0.9  # of the free memory: a model that needs more has its experts in a file
ITEM_BYTES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in STORED}


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint that is a parameter, or one part of it."""

    tensor: str
    layout: Layout
    shape: Shape  # once laid out our way
    head_size: int = 0
    kv_rows: int = 0  # grouped: rows of all the keys
    rows: range | None = None  # these rows of the tensor only, or of the matrices in a stack
    num_matrices: int = 1  # of the parameter, if it is a stack


Sources = dict[str, list[Source]]
STACKS = ("stack", "stack_transposed", "alternating", "alternating_transposed")


def ungroup(tensor: Tensor, head_size: int, kv_rows: int) -> Tensor:
    """Order rows that hold queries, key and value of each KV head in turn: all queries, all keys, all values."""
    groups = tensor.reshape(kv_rows // head_size, -1, head_size, *tensor.shape[1:])
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def _lay_out(tensor: Tensor, source: Source) -> Tensor:
    if source.rows is not None:
        tensor = tensor.flatten(0, tensor.ndim - len(source.shape))[source.rows.start : source.rows.stop]
    if source.layout == "transposed":
        return tensor.t()
    if source.layout == "grouped":
        return ungroup(tensor, source.head_size, source.kv_rows)
    if source.layout == "one_plus":
        return tensor.float() + 1.0
    if source.layout not in STACKS:
        return tensor
    if source.layout.endswith("transposed"):
        tensor = tensor.transpose(1, 2)
    if source.layout.startswith("alternating"):
        tensor = tensor.reshape(len(tensor), -1, 2, *tensor.shape[2:]).transpose(1, 2)
    return tensor.reshape(source.shape)


def _lay_out_runs(tensor: Tensor, source: Source, runs: Sequence[range]) -> Iterator[Tensor]:
    """Lay out only the rows in `runs`; of a stack, read only the matrices that have some of them."""
    if source.layout == "grouped":
        order = ungroup(torch.arange(source.shape[0]), source.head_size, source.kv_rows)
        yield from (tensor[order[run.start : run.stop]] for run in runs)
    elif source.layout in STACKS:
        height = source.shape[0] // source.num_matrices
        one = Source(source.tensor, source.layout, (height, *source.shape[1:]))
        for run in runs:
            for first in range(run.start - run.start % height, run.stop, height):
                index = first // height
                matrix = _lay_out(tensor[index : index + 1], one)
                yield matrix[max(run.start - first, 0) : run.stop - first]
    else:
        laid = _lay_out(tensor, source)
        yield from (laid[run.start : run.stop] for run in runs)


def from_checkpoint(
    checkpoint: Checkpoint, sources: Sources, dtype: torch.dtype | None, cuts: Cuts | None = None
) -> Take:
    """Read parameters by name: matrices in `dtype`, or if that is None as they are stored; vectors in float32."""

    def read(name: str) -> Tensor:
        tensor = checkpoint.tensor(name)
        if not tensor.is_floating_point():
            raise InvalidModel(f"{checkpoint.path}: tensor {name!r} holds {tensor.dtype}, not real numbers")
        return tensor

    def find_target(parts: list[Source]) -> torch.dtype:
        found = {getattr(torch, checkpoint.dtype(part.tensor), torch.float32) for part in parts}
        kept = found.pop() if len(found) == 1 and found <= set(STORED) else torch.float32
        return (dtype or kept) if len(parts[0].shape) == 2 else torch.float32

    def take(name: str) -> Tensor:
        cut = cuts.parameters.get(name) if cuts is not None else None
        if cut is not None:
            return take_part(name, cut)
        parts, shape = sources[name], sources[name][0].shape
        target = find_target(parts)
        if len(parts) == 1:
            one = _lay_out(read(parts[0].tensor), parts[0]).to(target)
            return one if one.ndim == 2 else one.clone()  # packing copies a matrix out of the file
        whole = torch.empty(sum(part.shape[0] for part in parts), *shape[1:], dtype=target)
        wanted: dict[str, list[tuple[Tensor, Source]]] = {}
        for place, part in zip(torch.split(whole, [part.shape[0] for part in parts]), parts):
            wanted.setdefault(part.tensor, []).append((place, part))
        for tensor, places in wanted.items():
            values = read(tensor)  # once, for all experts of a stack
            for place, part in places:
                place.copy_(_lay_out(values, part))
            del values  # before the next is read
        return whole

    def take_part(name: str, cut: Cut) -> Tensor:
        parts = sources[name]
        shape = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
        if cut.is_zero:
            return torch.zeros(shape)
        made, at = torch.empty(cut.shape(shape), dtype=find_target(parts)), 0
        for part, runs in split_runs(parts, cut):
            for rows in _lay_out_runs(read(part.tensor), part, runs):
                cut_rows = rows if cut.columns is None else rows[:, cut.columns.start : cut.columns.stop]
                made[at : at + len(rows)] = cut_rows
                at += len(rows)
        return made

    return take


def split_runs(parts: Sequence[Source], cut: Cut) -> Iterator[tuple[Source, list[range]]]:
    """Yield the parts of a parameter that a cut has rows of, each with these rows."""
    first = 0
    for part in parts:
        runs = cut.runs_within(first, part.shape[0])
        first += part.shape[0]
        if runs:
            yield part, runs


def from_seed(spec: ModelSpec, seed: int, dtype: torch.dtype | None, device: torch.device = CPU) -> Take:
    """Make random weights on the device, each from `seed` and its name, whatever else is loaded; on the meta device
    they have shapes only. A rank's are its part of the whole ones."""
    cuts = spec.cuts
    shapes: Shapes = (spec if cuts is None else cuts.whole).parameters()

    def make(name: str) -> Tensor:
        shape = shapes[name]
        if len(shape) == 1 and name.endswith(".weight"):
            return torch.ones(shape, device=device)
        if device.type == "meta":
            return torch.empty(shape, dtype=dtype if len(shape) == 2 else None, device=device)
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.randn(shape, generator=generator, device=device) * spec.init_std
        return values.to(dtype or torch.float32) if len(shape) == 2 else values

    def take(name: str) -> Tensor:
        cut = cuts.parameters.get(name) if cuts is not None else None
        return make(name) if cut is None else cut.take(make(name)).clone()

    return take


def read_blocks(checkpoint: Checkpoint, source: Source) -> Stored | None:
    """Read a matrix as the file codes it, its rows in our order; None if that needs more than moving rows."""
    stored = checkpoint.read_ggml(source.tensor) or checkpoint.read_codes(source.tensor)
    if stored is not None and source.rows is not None:
        stored = stored.slice_rows(source.rows)
    if stored is None or (stored.format is None and not stored.is_float8) or source.layout == "one_plus":
        return None
    if stored.transposed != source.layout.endswith("transposed"):
        return None
    if source.layout.startswith("alternating"):
        rows = torch.arange(stored.num_out).view(source.num_matrices, -1, 2)
        return stored.take_rows(rows.transpose(1, 2).flatten())
    if source.layout == "grouped":
        return stored.take_rows(ungroup(torch.arange(stored.num_out), source.head_size, source.kv_rows))
    return stored


def read_cut_blocks(checkpoint: Checkpoint, parts: Sequence[Source], cut: Cut | None) -> list[Stored] | None:
    """Read the parts of a matrix as the file codes them, or a rank's rows and columns of them; None as above."""
    found: list[Stored] = []
    whole = [(part, [range(part.shape[0])]) for part in parts]
    for part, runs in whole if cut is None else split_runs(parts, cut):
        stored = read_blocks(checkpoint, part)
        if stored is None:
            return None
        if runs != [range(stored.num_out)]:
            rows = [torch.arange(run.start, run.stop) for run in runs]
            stored = stored.slice_rows(runs[0]) if len(runs) == 1 else stored.take_rows(torch.cat(rows))
        if cut is not None and cut.columns is not None:
            columns = stored.take_columns(cut.columns)
            if columns is None:
                raise InvalidConfig(
                    f"{checkpoint.path}: blocks of {part.tensor!r} do not end at a rank's inputs {cut.columns.start} "
                    f"and {cut.columns.stop}: cut the model by outputs, or use fewer ranks"
                )
            stored = columns
        found.append(stored)
    return found


def find_codes(checkpoint: Checkpoint, parts: Sequence[Source]) -> Codes | None:
    """Find the codes in which a GPU holds a matrix, by headers as far as they tell, since its tensors would have to be
    read; None if it is widened."""
    if len(parts[0].shape) != 2:
        return None
    if not isinstance(checkpoint, QuantizedCheckpoint):
        stored = [read_blocks(checkpoint, part) for part in parts]
        found = [part.format if part is not None else None for part in stored]
    else:
        matrices = [checkpoint.matrices.get(tensor) for tensor in dict.fromkeys(part.tensor for part in parts)]
        if checkpoint.keeps_floats and all(matrix is not None and matrix.is_float8 for matrix in matrices):
            groups = {matrix.group or parts[0].shape[1] for matrix in matrices if matrix is not None}
            return Codes(group=groups.pop()) if len(groups) == 1 else None
        found = [matrix.likely_format if matrix is not None else None for matrix in matrices]
    formats = tuple(dict.fromkeys(each for each in found if each is not None))
    return None if None in found else Codes(formats)


def count_held_bytes(checkpoint: Checkpoint, spec: ModelSpec, sources: Sources, options: Options) -> int:
    """Count the bytes of a model, or of a rank's part, as a CPU holds it. Matrices that stay as the file codes them are
    taken to share evenly what other tensors leave of the file."""
    held = {name: shape for name, shape in spec.parameters().items() if spec.holds(name)}
    coded, total = 0, 0
    for name, shape in held.items():
        tensors = [source.tensor for source in sources.get(name, ())]
        if len(shape) < 2:
            total += 4 * prod(shape)
        elif options.dtype is None and tensors and all(map(checkpoint.is_packed, tensors)):
            coded += prod(shape)
        elif (kind := options.find_kind(name, shape[-1])) is not None:
            total += prod(shape[:-1]) * -(-shape[-1] // BLOCK) * QUANTIZERS[kind][1]
        else:
            total += prod(shape) * (options.dtype.itemsize if options.dtype else _item_bytes(checkpoint, tensors))
    return total + (int(coded * _bytes_per_code(checkpoint)) if coded else 0)


def _item_bytes(checkpoint: Checkpoint, tensors: list[str]) -> int:
    return max((ITEM_BYTES.get(checkpoint.dtype(tensor), 4) for tensor in tensors), default=4)


def _bytes_per_code(checkpoint: Checkpoint) -> float:
    """Return the mean bytes of a value that the file holds in codes."""
    coded, others = 0, 0
    for name in checkpoint.names():
        count = prod(checkpoint.shape(name))
        if checkpoint.is_packed(name):
            coded += count
        else:
            others += count * _item_bytes(checkpoint, [name])
    return max(0, checkpoint.num_bytes - others) / max(1, coded)


def find_spill(checkpoint: Checkpoint, spec: ModelSpec, sources: Sources, options: Options) -> Path | None:
    """Return the folder that experts are moved to; None if the model fits in memory, or has none."""
    if all(merge.num_matrices == 1 for merge in spec.merges().values()):
        return None
    needed, free = count_held_bytes(checkpoint, spec, sources, options), free_memory_bytes()
    if needed < SPILLING_SHARE * free:
        return None
    folder, tried = find_folder(checkpoint.path)
    if folder is None:
        raise InvalidModel(
            f"the model needs {needed / (1 << 30):.1f} GiB of {free / (1 << 30):.1f} that are free, and there is no "
            f"disk for its experts ({tried}): set TMPDIR to a folder on a disk"
        )
    return folder
