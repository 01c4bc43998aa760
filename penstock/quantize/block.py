"""Round one block of a model: note its inputs, scale, prune, round, and run what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.passes.observe import ObservedScheme
from penstock.quant.gguf import dequantize
from penstock.quant.scheme import Scheme
from penstock.quantize.gguf.blocks import TYPES, encode
from penstock.quantize.gptq import Factor, Sweep
from penstock.quantize.grids import Grid, fit_grid, round_tokens, search_grid
from penstock.quantize.hqq import fit_half_quadratic
from penstock.quantize.notes import Note
from penstock.quantize.prune import choose_zeros, sparsegpt
from penstock.quantize.smooth import Fold, apply_fold, awq_scale, find_folds, iter_norm_folds, smooth_scale
from penstock.quantize.targets import Target
from penstock.quantize.walk import LayerStack, Params, Walk


@dataclass
class Rounded:
    """A matrix as the file will hold it."""

    weight: Tensor  # [O, C] float32, as a reader widens it
    grid: Grid | None = None
    codes: Tensor | None = None  # [O, C]
    raw: Tensor | None = None  # bytes of GGUF blocks, one row per output


@dataclass
class RoundedBlock:
    params: Params  # vectors, and matrices widened
    matrices: dict[str, Rounded]  # by parameter; GGUF: by parameter and part
    errors: dict[str, float] = field(default_factory=dict)  # linear → relative error of its outputs


@dataclass(frozen=True)
class TensorRows:
    """Rows of a matrix that the file holds as a tensor of their own."""

    name: str
    rows: slice
    ggml_type: str = ""


Pieces = dict[str, list[TensorRows]]  # by parameter


class RoundedInputs:
    """Multiply inputs rounded to 8 bits, as kernels for such models do."""

    def __init__(self, scheme: Scheme, kind: str) -> None:
        self.scheme, self.kind = scheme, kind
        self.num_out, self.num_in = scheme.num_out, scheme.num_in

    @property
    def num_bytes(self) -> int:
        return self.scheme.num_bytes

    def matmul(self, x: Tensor) -> Tensor:
        return self.scheme.matmul(round_tokens(x, self.kind))

    def rows(self, ids: Tensor) -> Tensor:
        return self.scheme.rows(ids)


class BlockRounder:
    """Rounds blocks towards a target."""

    def __init__(self, stack: LayerStack, target: Target, dtype: torch.dtype, pieces: Pieces) -> None:
        self.stack, self.target, self.dtype, self.pieces = stack, target, dtype, pieces

    def round(self, index: int, walk: Walk | None, x: Tensor | None) -> tuple[RoundedBlock, Tensor | None]:
        """Round layer `index` for the inputs x[T, C] → the block, and its outputs for the next one."""
        params = self.stack.params(index)
        linears = [name.removesuffix(".weight") for name, value in params.items() if value.ndim == 2]
        notes: dict[str, Note] = {}
        if walk is not None and x is not None:
            notes = self._observe(index, params, walk, x)
            self._scale(index, params, notes)
        matrices: dict[str, Rounded] = {}
        errors: dict[str, float] = {}
        for linear in linears:
            name, note = f"{linear}.weight", notes.get(linear)
            before = params[name]
            params[name] = self._matrix(f"layers.{index}.{name}", before, note, matrices)
            if note is not None:
                errors[f"layers.{index}.{linear}"] = note.error(before, params[name])
        if walk is None or x is None:
            return RoundedBlock(params, matrices, errors), None
        kind = self.target.activations
        block = self.stack.block(index, params, (lambda _, scheme: RoundedInputs(scheme, kind)) if kind else None)
        return RoundedBlock(params, matrices, errors), walk.run(block, self.stack.memory(index), x)

    def _observe(self, index: int, params: Params, walk: Walk, x: Tensor) -> dict[str, Note]:
        notes: dict[str, Note] = {}

        def wrap(name: str, scheme: Scheme) -> Scheme:
            note = notes[name] = Note(scheme.num_in, self.target.wants_squares)
            return ObservedScheme(name, scheme, lambda _, given: note.add(given))

        walk.run(self.stack.block(index, params, wrap), self.stack.memory(index), x)
        return notes

    def _scale(self, index: int, params: Params, notes: dict[str, Note]) -> None:
        block = self.stack.spec.layers[index]
        folds: list[Fold] = []
        if self.target.method == "awq":
            folds = find_folds(block)
        elif self.target.method == "smoothquant":
            folds = list(iter_norm_folds(block))
        for fold in folds:
            if self.target.method == "awq":
                scale = awq_scale(fold, params, notes, self._try(index, fold))
            else:
                scale = smooth_scale(fold, params, notes)
            if scale is not None:
                apply_fold(fold, scale, params, notes)

    def _try(self, index: int, fold: Fold):  # type: ignore[no-untyped-def]
        """Return how a search rounds: as in the end, but GGUF's many types as 4 bits with groups of 32."""

        def round_off(weight: Tensor, note: Note) -> Tensor:
            if self.target.kind == "gguf":
                return fit_grid(weight, 4, 32, torch.float32).round(weight)
            return fit_grid(weight, self.target.bits, self.target.group, self.dtype).round(weight)

        return round_off

    def _matrix(self, name: str, weight: Tensor, note: Note | None, found: dict[str, Rounded]) -> Tensor:
        """Prune and round one matrix, keep what is to be written, and return it widened."""
        target = self.target
        zeros = None
        sweep: Sweep | None = None
        if target.sparsity != "none":
            assert note is not None
            if target.prune == "sparsegpt":
                sweep = sparsegpt(target.sparsity)
            else:
                zeros = choose_zeros(weight, note, target.sparsity, target.prune)
        if target.kind == "gguf":
            weight = self._prune(weight, note, sweep, zeros)
            return self._blocks(name, weight, note, found)
        if target.method == "gptq":
            assert note is not None and note.products is not None
            sweep = sweep or Sweep(mask=zeros)
            sweep.group = target.group
            sweep.fit = lambda part: fit_grid(part, target.bits, 0, self.dtype)
            widened, grid = sweep.run(weight, Factor(note.products, target.act_order and sweep.choose is None))
            assert grid is not None
        else:
            weight = self._prune(weight, note, sweep, zeros)
            grid = self._fit(weight, note)
            widened = weight.to(self.dtype).float() if grid is None else grid.round(weight)
        codes = None if grid is None else grid.codes(widened)
        found[name] = Rounded(widened, grid, codes)
        return widened

    def _prune(self, weight: Tensor, note: Note | None, sweep: Sweep | None, zeros: Tensor | None) -> Tensor:
        if sweep is not None:
            assert note is not None and note.products is not None
            return sweep.run(weight, Factor(note.products, by_size=False))[0]
        return weight if zeros is None else weight.masked_fill(zeros, 0.0)

    def _fit(self, weight: Tensor, note: Note | None) -> Grid | None:
        target = self.target
        if target.kind == "dense":
            return None
        if target.method == "hqq":
            return fit_half_quadratic(weight, target.bits, target.group, self.dtype)
        if target.method == "awq" and note is not None:
            return search_grid(weight, target.bits, target.group, self.dtype, note.importance)
        return fit_grid(weight, target.bits, target.group, self.dtype, is_float=target.kind == "fp8")

    def _blocks(self, name: str, weight: Tensor, note: Note | None, found: dict[str, Rounded]) -> Tensor:
        importance = None if note is None else note.importance
        widened = torch.empty_like(weight)
        for piece in self.pieces[name]:
            part = weight[piece.rows]
            raw = encode(part, piece.ggml_type, importance)
            values = dequantize(raw.reshape(-1), TYPES[piece.ggml_type], tuple(part.shape))
            widened[piece.rows] = torch.from_numpy(values)
            found[f"{name}/{piece.name}"] = Rounded(widened[piece.rows], raw=torch.from_numpy(raw))
        return widened
