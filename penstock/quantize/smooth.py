"""Move scales from inputs into weights, where something before can be divided by them (AWQ, SmoothQuant).

x / s goes into W · s: the product is the same, but its rounding is not. What is divided is a norm's weight, or the rows
of the matrix that makes the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.models.layer import Attention, GatedMlp, LayerNorm, Mlp
from penstock.models.spec import AnyBlock, parts
from penstock.quantize.notes import Note

STEPS = 20  # exponents that AWQ tries
ALPHA = 0.5  # SmoothQuant's share of the inputs' range
MIN_SCALE = 1e-4


@dataclass(frozen=True)
class Fold:
    """Linears that share an input, and the parameters whose rows make it."""

    linears: tuple[str, ...]
    divided: tuple[tuple[str, slice], ...]
    repeats: tuple[int, int] = (1, 1)  # KV heads, and query heads that read the same one
    is_norm: bool = True

    def gather(self, values: Tensor) -> Tensor:
        """Reduce values of inputs [C] to those of rows that make them: the largest of the copies."""
        if self.is_norm:
            return values
        heads, copies = self.repeats
        return values.view(heads, copies, -1).amax(1).flatten()

    def spread(self, values: Tensor) -> Tensor:
        if self.is_norm:
            return values
        heads, copies = self.repeats
        return values.view(heads, 1, -1).expand(-1, copies, -1).flatten()


def find_folds(block: AnyBlock) -> list[Fold]:
    """Find what can be scaled in a block, inner matrices before the norms ahead of them."""
    inner: list[Fold] = []
    inputs: dict[str, list[str]] = {}
    prefixes = {name: (prefix, part) for name, prefix, part in parts(block)}
    for half, norm in (("mixer", "mixer_norm"), ("ffn", "ffn_norm")):
        if half not in prefixes:
            continue
        prefix, part = prefixes[half]
        if isinstance(part, Attention):
            first, (q, k, v) = "qkv", part.rows
            rows = slice(q + k, q + k + v)
            copies = part.num_heads // part.num_kv_heads
            divided = (("attention.qkv.weight", rows), ("attention.qkv.bias", rows))
            inner.append(Fold(("attention.out",), divided, (part.num_kv_heads, copies), is_norm=False))
        elif isinstance(part, GatedMlp):
            first, rows = "gate_up", slice(part.hidden, 2 * part.hidden)
            divided = (("mlp.gate_up.weight", rows), ("mlp.gate_up.bias", rows))
            inner.append(Fold(("mlp.down",), divided, is_norm=False))
        elif isinstance(part, Mlp):
            first = "up"
        else:
            continue  # the norm ahead of experts and latents stays as it is
        source = norm if norm in prefixes else "mixer_norm" if type(block).__name__ == "ParallelBlock" else ""
        if source and type(block).__name__ != "PostNormBlock":
            inputs.setdefault(source, []).append(f"{prefix}.{first}")
    for source, linears in inputs.items():
        prefix, norm_part = prefixes[source]
        names = ("weight", "bias") if isinstance(norm_part, LayerNorm) and norm_part.bias else ("weight",)
        inner.append(Fold(tuple(linears), tuple((f"{prefix}.{name}", slice(None)) for name in names)))
    return inner


def apply_fold(fold: Fold, scale: Tensor, params: dict[str, Tensor], notes: dict[str, Note]) -> None:
    """Multiply the linears' inputs' weights by scale, and divide by it what makes the inputs."""
    for name, rows in fold.divided:
        if name in params:
            value = params[name].clone()
            value[rows] = value[rows] / (scale[:, None] if value.ndim == 2 else scale)
            params[name] = value
    spread = fold.spread(scale)
    for linear in fold.linears:
        params[f"{linear}.weight"] = params[f"{linear}.weight"] * spread
        notes[linear].divide(spread)


Round = Callable[[Tensor, Note], Tensor]


def awq_scale(fold: Fold, params: dict[str, Tensor], notes: dict[str, Note], round_off: Round) -> Tensor | None:
    """Search the exponent of the inputs' mean magnitude that leaves the least error of the outputs; None: no scale."""
    note = notes[fold.linears[0]]
    size = fold.gather(note.magnitudes / max(1, note.count)).clamp(min=MIN_SCALE)
    weights = [params[f"{linear}.weight"] for linear in fold.linears]
    best, least = None, torch.inf
    for step in range(STEPS):
        scale = size.pow(step / STEPS)
        scale = (scale / (scale.max() * scale.min()).sqrt()).clamp(min=MIN_SCALE)
        spread = fold.spread(scale)
        error = sum(_cost(note, round_off(w * spread, _rescale(note, spread)) / spread - w) for w in weights)
        if error < least:
            best, least = (scale if step else None), error
    return best


def _rescale(note: Note, scale: Tensor) -> Note:
    """The note's importance for inputs divided by scale; nothing else of it."""
    made = Note(note.width, wants_products=False)
    made.count, made.squares = note.count, note.squares / scale.square()
    return made


def _cost(note: Note, change: Tensor) -> float:
    """Squared error of the outputs over all noted inputs: tr(Δ Σxxᵀ Δᵀ)."""
    if note.products is None:
        return float((note.sample @ change.t()).square().sum())
    return float((change @ note.products * change).sum())


def smooth_scale(fold: Fold, params: dict[str, Tensor], notes: dict[str, Note]) -> Tensor:
    """Share the range of inputs with the weights: √(largest input / largest weight) at α = ½."""
    most = torch.stack([params[f"{linear}.weight"].abs().amax(0) for linear in fold.linears]).amax(0)
    inputs = fold.gather(notes[fold.linears[0]].largest).clamp(min=MIN_SCALE)
    weights = fold.gather(most).clamp(min=MIN_SCALE)
    scale: Tensor = (inputs.pow(ALPHA) / weights.pow(1 - ALPHA)).clamp(min=MIN_SCALE)
    return scale


def iter_norm_folds(block: AnyBlock) -> Iterator[Fold]:
    """Yield the folds into norms: kernels for 8-bit activations round what a norm makes."""
    yield from (fold for fold in find_folds(block) if fold.is_norm)
