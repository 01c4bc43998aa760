"""Every body in the registry against its reference, and every exact one for independence of rows and threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.ops import OPS, Op
from penstock.ops.registry import Body
from tests.ops.check import check_near_reference, check_rows_independent, results, same_bits
from tests.ops.examples import example_of, examples_of

WITH_BODY = [op for op in OPS.values() if "cpu" in op.bodies]
CASES: list[Any] = [pytest.param(op, i, id=f"{op.name}-{i}") for op in WITH_BODY for i in range(len(examples_of(op)))]
EXACT = [case for case in CASES if case.values[0].bodies["cpu"].exact]
REFERENCE_ONLY = {"causal_conv", "state_scan"}  # computed row by row


def test_every_op_has_an_exact_body() -> None:
    without = {op.name for op in OPS.values() if "cpu" not in op.bodies or not op.bodies["cpu"].exact}
    assert without - REFERENCE_ONLY <= {
        "add_lora_columns",
        "add_lora_stacks",
        "fp8_group_product",
        "fp8_mlp",
        "fp8_product",
        "grouped_fp8_group_product",
        "grouped_fp8_product",
        "grouped_int_product",
        "grouped_product",
        "head_product",
        "int_product",
        "int_rows",
        "product",
        "qkv_attention",
        "report",
        "sample",
        "single_inputs",  # a GPU's alone
        "pooling",
    }  # its reference is exact
    assert all(len(examples_of(op)) >= 4 for op in WITH_BODY)


@pytest.mark.parametrize(("op", "index"), CASES)
def test_near_reference(op: Op[..., Any], index: int, path: str) -> None:
    check_near_reference(op, index)


@pytest.mark.parametrize(("op", "index"), EXACT)
def test_rows_are_independent(op: Op[..., Any], index: int, path: str) -> None:
    check_rows_independent(op, index)


@pytest.mark.parametrize("name", sorted(REFERENCE_ONLY))
def test_rows_of_references_are_independent(name: str) -> None:
    assert OPS[name].rowwise
    for index in range(len(examples_of(OPS[name]))):
        check_rows_independent(OPS[name], index)


@pytest.mark.parametrize("op", WITH_BODY, ids=lambda op: op.name)
def test_threads_do_not_matter(op: Op[..., Any], path: str, threads: None) -> None:
    from penstock.ops import cpu

    for index in range(len(examples_of(op))):
        found = []
        for count in (1, 2, 3, 7):
            cpu.set_num_threads(count)
            example = example_of(op, index)
            result = op(**example)
            written = [example[name] for name in ("k_cache", "v_cache", "k_scale", "v_scale") if name in example]
            found.append(written if result is None else [*results(result), *written])
        for other in found[1:]:
            assert all(same_bits(a, b) for a, b in zip(found[0], other)), f"{op.name}, example {index}"


def _planted(op: Op[..., Any], monkeypatch: pytest.MonkeyPatch, mistake: Any) -> None:
    right = op.bodies["cpu"].function
    monkeypatch.setitem(op.bodies, "cpu", Body(lambda *args, **kwargs: mistake(right, *args, **kwargs), exact=True))


def _fails(check: Any, op: Op[..., Any]) -> bool:
    failures = 0
    for index in range(len(examples_of(op))):
        try:
            check(op, index)
        except AssertionError:
            failures += 1
    return failures > 0


def _shifted_by_others(right: Any, x: Tensor, *args: Any) -> Tensor:
    return right(x, *args) * (1 + torch.finfo(torch.float32).eps * (x.shape[0] > 3))


def _wrong_last_row(right: Any, x: Tensor, *args: Any) -> Tensor:
    y = right(x, *args)
    y[-1:] *= 1.001
    return y


@pytest.mark.parametrize("name", ["linear", "rms_norm", "activation", "log_softmax"])
def test_the_checks_can_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit that depends on the number of rows, and one row off by a thousandth, are both noticed."""
    op = OPS[name]
    assert not _fails(check_rows_independent, op) and not _fails(check_near_reference, op)
    _planted(op, monkeypatch, lambda right, **example: _shifted_by_others(right, *example.values()))
    assert _fails(check_rows_independent, op)
    assert not _fails(check_near_reference, op)
    monkeypatch.undo()
    _planted(op, monkeypatch, lambda right, **example: _wrong_last_row(right, *example.values()))
    assert _fails(check_near_reference, op)


def test_torch_itself_would_not_pass() -> None:
    """The references round differently in other company: the reason why each op has a body."""
    from penstock.ops import cpu

    with cpu.override_path("reference"):
        assert _fails(check_rows_independent, OPS["linear"])
