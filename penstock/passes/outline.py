"""Build a model as loading would, its weights blank: on the meta device to count bytes, in memory to time steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from penstock.models.decoder import CPU, Build, Decoder, Encoder
from penstock.models.files import Checkpoint
from penstock.models.files.quantized.checkpoint import is_float8, keep_floats, requantize_floats
from penstock.models.load import ABSORBED, Options, match
from penstock.models.pooling import Pooling
from penstock.models.reading import STORED, Source, Sources, find_codes, read_blocks
from penstock.models.spec import ModelSpec
from penstock.ops import FORMATS, Format, OpTable, PackedWeight, cpu
from penstock.passes.lower import Lower
from penstock.quant.coded import Coded
from penstock.quant.dense import Dense
from penstock.quant.gguf import GGML_TYPES
from penstock.quant.ints import QUANTIZERS
from penstock.quant.packed import Packed
from penstock.quant.permuted import Permuted
from penstock.quant.scheme import Scheme

BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in STORED}


def blank_model(
    checkpoint: Checkpoint | None, spec: ModelSpec, options: Options, device: torch.device, num_layers: int = 0
) -> Decoder | Encoder:
    """Build the model for a CPU, or its first layers, with blank weights on `device`."""
    sources = match(checkpoint, spec) if checkpoint else {}
    ops = OpTable("cpu")
    some = replace(spec, layers=spec.layers[:num_layers]) if num_layers else spec
    stored = requantize_floats(checkpoint) if options.rounded else checkpoint
    blanks = _Blanks(ops, spec.parameters(), options, stored, sources, device)
    with device:
        return Build(some, ops, blanks.take, blanks.hold, device, Lower(ops)).model(Pooling())


class _Blanks:
    """Weights without values, each as `penstock.models.load.storage` would keep it."""

    def __init__(
        self,
        ops: OpTable,
        shapes: Mapping[str, tuple[int, ...]],
        options: Options,
        checkpoint: Checkpoint | None,
        sources: Sources,
        device: torch.device,
    ) -> None:
        self._ops, self._shapes, self._options = ops, shapes, options
        self._checkpoint, self._sources, self._device = checkpoint, sources, device

    def take(self, name: str) -> Tensor:
        shape = self._shapes[name]
        return torch.zeros(
            shape, dtype=self._find_dtype(name) if len(shape) == 2 else torch.float32, device=self._device
        )

    def _find_dtype(self, name: str) -> torch.dtype:
        if self._options.dtype is not None or self._checkpoint is None:
            return self._options.dtype or torch.float32
        found = {self._checkpoint.dtype(source.tensor) for source in self._sources[name]}
        return BY_NAME.get(found.pop(), torch.float32) if len(found) == 1 else torch.float32

    def hold(self, name: str, bias: Tensor | None) -> Scheme:
        num_out, num_in = self._shapes[name]
        bits = self._options.x_bits(name)
        if (packed := self._pack_like_file(name, bias)) is not None:
            return packed
        if (kind := self._options.find_kind(name, num_in)) is not None:
            return Packed(
                self._ops, [_empty(FORMATS[GGML_TYPES[QUANTIZERS[kind][0]].name], num_out, num_in)], bias, bits
            )
        return Dense(self._ops, self.take(name), bias)

    def _pack_like_file(self, name: str, bias: Tensor | None) -> Scheme | None:
        """Make a blank weight of the types of the file's blocks; None where loading would widen them."""
        if self._checkpoint is None or self._options.dtype is not None or cpu.path() == "reference":
            return None
        runs: list[tuple[Format, int, int]] = []  # format, rows, width
        order: Tensor | None = None
        for source in self._sources[name]:
            with CPU:  # rows are put in order by their numbers
                stored = read_blocks(self._checkpoint, source)
            if stored is None or stored.format is None:
                return None
            if runs and runs[-1][0] == stored.format:
                runs[-1] = stored.format, runs[-1][1] + stored.num_out, stored.width
            else:
                runs.append((stored.format, stored.num_out, stored.width))
            order = stored.order if isinstance(stored, Coded) and stored.order is not None else order
        packed = Packed(self._ops, [_empty(*run) for run in runs], bias, self._options.x_bits(name))
        return packed if order is None else Permuted(self._ops, packed, order.to(self._device))


def _empty(format: Format, num_out: int, num_in: int) -> PackedWeight:
    weight = PackedWeight.empty(format, num_out, num_in)
    for plane in vars(weight).values():
        if isinstance(plane, Tensor):
            plane.zero_()  # real memory, not the one page of zeros
    return weight


def count_packed_bytes(checkpoint: Checkpoint, spec: ModelSpec, has_fp8: bool = False) -> int:
    """Count the bytes of a model on a GPU that keeps the codes of quantized matrices, 8-bit floats too if it multiplies
    them; 0 if the checkpoint has none."""
    if not any(checkpoint.is_packed(name) or has_fp8 and is_float8(checkpoint, name) for name in checkpoint.names()):
        return 0
    kept = keep_floats(checkpoint) if has_fp8 else checkpoint
    shapes, total = spec.parameters(), 0
    for name, parts in match(checkpoint, spec).items():
        codes = find_codes(kept, parts) if not name.endswith(ABSORBED) else None
        total += 2 * prod(shapes[name]) if codes is None else codes.count_bytes(*shapes[name])
    return total


def tensors_of(thing: Any) -> Iterator[Tensor]:
    """Yield the tensors that a model is made of, each storage once."""
    seen: set[int] = set()
    todo: list[Any] = [thing]
    while todo:
        one = todo.pop()
        if isinstance(one, Tensor):
            storage = one.untyped_storage()._cdata
            if storage not in seen:
                seen.add(storage)
                yield one
        elif id(one) not in seen:
            seen.add(id(one))
            if isinstance(one, Mapping):
                todo += one.values()
            elif isinstance(one, Sequence) and not isinstance(one, str | bytes):
                todo += one
            elif type(one).__module__.startswith("penstock.") and not isinstance(one, ModelSpec | Source):
                todo += getattr(one, "__dict__", {}).values()


def weight_bytes(model: Decoder | Encoder) -> int:
    """Count the bytes of a model's tensors: weights, and tables such as rope's."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(model))
