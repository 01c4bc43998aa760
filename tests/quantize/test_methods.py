"""Methods on inputs that are correlated and unequal, where they must beat plain rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.quantize.gptq import Factor, Sweep
from penstock.quantize.grids import Grid, fit_grid, round_tokens
from penstock.quantize.hqq import fit_half_quadratic
from penstock.quantize.notes import Note
from penstock.quantize.prune import choose_zeros, sparsegpt
from penstock.quantize.smooth import Fold, apply_fold, awq_scale, smooth_scale

WIDTH = 192


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    random = torch.Generator().manual_seed(0)
    mix = torch.randn(WIDTH, WIDTH, generator=random) / WIDTH**0.5 + 0.5 * torch.eye(WIDTH)
    sizes = torch.rand(WIDTH, generator=random).pow(4) * 4 + 0.05
    return torch.randn(1500, WIDTH, generator=random) @ mix * sizes


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(1)) * 0.05


def note_of(x: Tensor) -> Note:
    note = Note(WIDTH)
    for part in x.split(400):
        note.add(part)
    return note


def error(x: Tensor, weight: Tensor, rounded: Tensor) -> float:
    return float((x @ (weight - rounded).t()).norm() / (x @ weight.t()).norm())


def grid(weight: Tensor) -> Grid:
    return fit_grid(weight, 4, 0, torch.bfloat16)


def test_notes_are_sums_over_all_inputs(inputs: Tensor) -> None:
    note = note_of(inputs)
    assert note.count == len(inputs) and note.products is not None
    unit = inputs / inputs.norm(dim=1, keepdim=True)
    assert torch.allclose(note.products, unit.t() @ unit, rtol=1e-4, atol=1e-3)
    assert torch.allclose(note.importance, inputs.square().mean(0), rtol=1e-4)
    assert torch.equal(note.largest, inputs.abs().amax(0))
    scale = torch.linspace(0.5, 2, WIDTH)
    note.divide(scale)
    scaled = note_of(inputs / scale)
    for name in ("squares", "magnitudes", "largest", "sample"):
        assert torch.allclose(getattr(note, name), getattr(scaled, name), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("group", [0, 24, 32, 64])
@pytest.mark.parametrize("by_size", [False, True])
def test_gptq_beats_plain_rounding(inputs: Tensor, weight: Tensor, group: int, by_size: bool) -> None:
    plain = fit_grid(weight, 4, group, torch.bfloat16).round(weight)
    rounded, found = Sweep(fit=grid, group=group).run(weight, Factor(note_of(inputs).products, by_size))  # type: ignore[arg-type]
    assert found is not None and torch.equal(found.round(rounded), rounded)  # every value lies on its grid
    assert error(inputs, weight, rounded) < 0.85 * error(inputs, weight, plain)


def test_awq_beats_plain_rounding(inputs: Tensor, weight: Tensor) -> None:
    params = {"norm.weight": torch.ones(WIDTH), "up.weight": weight}
    notes, fold = {"up": note_of(inputs)}, Fold(("up",), (("norm.weight", slice(None)),))

    def round_off(w: Tensor, note: Note) -> Tensor:
        return fit_grid(w, 4, 64, torch.bfloat16).round(w)

    scale = awq_scale(fold, params, notes, round_off)
    assert scale is not None
    apply_fold(fold, scale, params, notes)
    x = inputs * params["norm.weight"]
    assert torch.allclose(x @ params["up.weight"].t(), inputs @ weight.t(), atol=1e-3)
    rounded = round_off(params["up.weight"], notes["up"])
    plain = round_off(weight, notes["up"])
    ours = float((x @ rounded.t() - inputs @ weight.t()).norm())
    assert ours < 0.9 * float((inputs @ (plain - weight).t()).norm())


def test_folds_through_shared_heads_leave_the_product() -> None:
    """Two query heads read each KV head: their inputs' scales must be the same."""
    values, out = torch.randn(8, 5), torch.randn(6, 16)
    x = torch.randn(3, 5)

    def product(params: dict[str, Tensor]) -> Tensor:
        heads = (x @ params["attention.qkv.weight"].t()).view(3, 2, 1, 4).expand(-1, -1, 2, -1)
        return heads.reshape(3, 16) @ params["attention.out.weight"].t()

    params = {"attention.qkv.weight": values, "attention.out.weight": out}
    fold = Fold(("attention.out",), (("attention.qkv.weight", slice(0, 8)),), (2, 2), is_norm=False)
    before, notes = product(params), {"attention.out": Note(16)}
    apply_fold(fold, torch.rand(8) + 0.5, params, notes)
    assert torch.allclose(product(params), before, atol=1e-5) and not torch.equal(params["attention.out.weight"], out)


def test_smoothing_helps_inputs_with_outliers(inputs: Tensor, weight: Tensor) -> None:
    x = inputs.clone()
    x[:, 7] *= 80
    params = {"norm.weight": torch.ones(WIDTH), "up.weight": weight}
    notes, fold = {"up": note_of(x)}, Fold(("up",), (("norm.weight", slice(None)),))

    def run(given: Tensor, w: Tensor) -> Tensor:
        return round_tokens(given, "int8") @ fit_grid(w, 8, 0, torch.bfloat16).round(w).t()

    plain = (run(x, weight) - x @ weight.t()).norm()
    apply_fold(fold, smooth_scale(fold, params, notes), params, notes)
    assert (run(x * params["norm.weight"], params["up.weight"]) - x @ weight.t()).norm() < 0.5 * plain


def test_hqq_beats_plain_rounding_of_heavy_tails() -> None:
    weight = torch.distributions.StudentT(3.0).sample((64, WIDTH)) * 0.02
    rounded = fit_half_quadratic(weight, 4, 64, torch.bfloat16)
    assert rounded.zero is not None and torch.equal(rounded.zero, rounded.zero.round())
    plain = fit_grid(weight, 4, 64, torch.bfloat16).round(weight)
    assert (rounded.round(weight) - weight).abs().mean() < (plain - weight).abs().mean()


@pytest.mark.parametrize("sparsity", ["0.5", "2:4"])
def test_pruning_by_error_beats_norms_beats_magnitude(inputs: Tensor, weight: Tensor, sparsity: str) -> None:
    note = note_of(inputs)
    left = {by: error(inputs, weight, weight.masked_fill(choose_zeros(weight, note, sparsity, by), 0.0))
            for by in ("magnitude", "wanda")}  # fmt: skip
    assert note.products is not None
    pruned, _ = sparsegpt(sparsity).run(weight, Factor(note.products, by_size=False))
    assert float((pruned == 0).float().mean()) == 0.5
    assert left["wanda"] < left["magnitude"]
    assert error(inputs, weight, pruned) < left["wanda" if sparsity == "2:4" else "magnitude"]


def test_a_sweep_keeps_zeros_and_rounds_the_rest(inputs: Tensor, weight: Tensor) -> None:
    note = note_of(inputs)
    mask = choose_zeros(weight, note, "2:4", "wanda")
    assert note.products is not None
    rounded, _ = Sweep(fit=grid, group=64, mask=mask).run(weight, Factor(note.products, by_size=True))
    assert not rounded[mask].any() and rounded[~mask].count_nonzero() > 0.8 * (~mask).sum()


def test_inputs_that_never_come_are_no_trouble(weight: Tensor) -> None:
    x = torch.zeros(40, WIDTH)
    x[:, :3] = torch.randn(40, 3)
    rounded, _ = Sweep(fit=grid, group=64).run(weight, Factor(note_of(x).products, by_size=True))  # type: ignore[arg-type]
    assert rounded.isfinite().all() and not rounded[:, 3:].any()
    assert error(x, weight, rounded) < 0.2
