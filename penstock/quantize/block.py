"""Round one block of a model: note its inputs, scale, prune, round, and run what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.passes.observe import ObservedScheme
from penstock.quant.gguf import dequantize
from penstock.quant.scheme import Scheme
from penstock.quantize.gguf.blocks import TYPES, encode
from penstock.quantize.gptq import Factor, Sweep
from penstock.quantize.grids import Grid, fit_grid, round_tokens, search_grid
from penstock.quantize.hqq import fit_half_quadratic
from penstock.quantize.layout import is_kept
from penstock.quantize.notes import Note, ObservedStack
from penstock.quantize.prune import choose_zeros, sparsegpt
from penstock.quantize.smooth import Fold, apply_fold, awq_scale, find_folds, iter_norm_folds, smooth_scale
from penstock.quantize.targets import Target
from penstock.quantize.walk import LayerStack, Params, Walk, Wrap


@dataclass
class Rounded:
    """A matrix as the file will hold it."""

    weight: Tensor  # [O, C] float32, as a reader widens it
    grid: Grid | None = None
    codes: Tensor | None = None  # [O, C]
    raw: Tensor | None = None  # bytes of GGUF blocks, one row per output

    @staticmethod
    def join(parts: Sequence[Rounded]) -> Rounded:
        """Put the matrices of a stack below each other."""
        grids = [part.grid for part in parts if part.grid is not None]
        codes = [part.codes for part in parts if part.codes is not None]
        raws = [part.raw for part in parts if part.raw is not None]
        return Rounded(
            torch.cat([part.weight for part in parts]),
            Grid.join(grids) if grids else None,
            torch.cat(codes) if codes else None,
            torch.cat(raws) if raws else None,
        )


@dataclass
class RoundedBlock:
    params: Params  # vectors, and matrices widened
    matrices: dict[str, Rounded]  # by parameter; GGUF: by parameter and part
    errors: dict[str, float] = field(default_factory=dict)  # linear → relative error of its outputs


@dataclass(frozen=True)
class TensorRows:
    """Rows of a matrix, or of each matrix of a stack, that the file holds as a tensor of their own."""

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

    def grouped_matmul(self, x: Tensor, ids: Tensor, num_matrices: int) -> Tensor:
        stack: Any = self.scheme
        made: Tensor = stack.grouped_matmul(round_tokens(x.flatten(0, -2), self.kind).view_as(x), ids, num_matrices)
        return made

    def rows(self, ids: Tensor) -> Tensor:
        return self.scheme.rows(ids)


def round_inputs(kind: str) -> Wrap:
    """Round the inputs of all linears but those that stay in 16 bits."""
    return lambda name, scheme: scheme if is_kept(f".{name}.weight") else RoundedInputs(scheme, kind)


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
        counts = self.stack.count_matrices(index)
        for linear in linears:
            name = f"layers.{index}.{linear}.weight"
            if not self.pieces.get(name) if self.target.kind == "gguf" else is_kept(name):
                continue
            inner = f"{linear}.weight"
            if linear in counts:
                params[inner] = self._stack(name, params[inner].chunk(counts[linear]), notes, matrices, errors)
                continue
            before, note = params[inner], notes.get(linear)
            params[inner] = self._matrix(name, before, note, matrices)
            if note is not None:
                errors[f"layers.{index}.{linear}"] = note.error(before, params[inner])
        if walk is None or x is None:
            return RoundedBlock(params, matrices, errors), None
        kind = self.target.activations
        block = self.stack.block(index, params, round_inputs(kind) if kind else None)
        return RoundedBlock(params, matrices, errors), walk.run(block, self.stack.memory(index), x)

    def _stack(
        self,
        name: str,
        weights: Sequence[Tensor],
        notes: dict[str, Note],
        found: dict[str, Rounded],
        errors: dict[str, float],
    ) -> Tensor:
        """Round the matrices of a stack one by one; one that no token came to is rounded by its weights alone."""
        _, number, linear = name.removesuffix(".weight").split(".", 2)
        made: list[Tensor] = []
        rounded: dict[str, list[Rounded]] = {}
        for index, before in enumerate(weights):
            expert, one = name_expert(linear, index), dict[str, Rounded]()
            note = notes.get(expert)
            note = note if note is not None and note.count else None
            made.append(self._matrix(name, before, note, one))
            for key, value in one.items():
                rounded.setdefault(key, []).append(value)
            if note is not None:
                errors[f"layers.{number}.{expert}"] = note.error(before, made[-1])
        found |= {key: Rounded.join(parts) for key, parts in rounded.items()}
        return torch.cat(made)

    def _observe(self, index: int, params: Params, walk: Walk, x: Tensor) -> dict[str, Note]:
        notes: dict[str, Note] = {}
        counts = self.stack.count_matrices(index)

        def wrap(name: str, scheme: Any) -> Scheme:
            if name in counts:
                each = {name_expert(name, number): self._note(scheme.num_in) for number in range(counts[name])}
                notes.update(each)
                return ObservedStack(scheme, list(each.values()))
            note = notes[name] = self._note(scheme.num_in)
            return ObservedScheme(name, scheme, lambda _, given: note.add(given))

        walk.run(self.stack.block(index, params, wrap), self.stack.memory(index), x)
        return notes

    def _note(self, width: int) -> Note:
        return Note(width, self.target.wants_squares)

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
            if target.prune == "sparsegpt" and note is not None:
                sweep = sparsegpt(target.sparsity)
            else:
                zeros = choose_zeros(weight, note, target.sparsity, target.prune)
        if target.kind == "gguf":
            weight = self._prune(weight, note, sweep, zeros)
            return self._blocks(name, weight, note, found)
        if target.method == "gptq" and note is not None:
            assert note.products is not None
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


def name_expert(linear: str, index: int) -> str:
    """Name one matrix of a stack: `mlp.experts.down` → `mlp.experts.3.down`."""
    above, _, last = linear.rpartition(".")
    return f"{above}.{index}.{last}"
