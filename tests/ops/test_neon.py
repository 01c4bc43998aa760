"""The kernels for ARM under an emulator: near their references, rows independent, integers to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock import ops
from penstock.ops import OPS, Op, cpu
from penstock.ops.cpu.matmul.packed import pack_into
from penstock.ops.cpu.runtime.library import KERNELS
from penstock.quant.gguf import GGML_TYPES
from penstock.quant.grid_planes import find_grid_format
from tests.ops.check import check_near_reference, check_rows_independent, same_bits
from tests.ops.emulator import Emulator, build, emulated, missing, paths_of
from tests.ops.examples import example_of, examples_of

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]  # the first test compiles for minutes
WITH_BODY = [op for op in OPS.values() if "cpu" in op.bodies]
EVERY_OP = pytest.mark.parametrize("op", WITH_BODY, ids=lambda op: op.name)
# The oldest processors that must do: the first 64-bit ones, and early ones with integer dot products.
PROCESSORS = {"generic": "cortex-a53", "neon": "neoverse-n1"}


@pytest.fixture(scope="module", params=["neon", pytest.param("generic", marks=pytest.mark.slow)])
def emulator(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    build()
    started = Emulator(PROCESSORS[request.param], request.param)
    yield started
    started.close()


def _some(op: Op[..., Any]) -> range:
    """Examples enough to meet every format, shape and option of an op."""
    return range(0, len(examples_of(op)), 1 if len(examples_of(op)) < 12 else 3)


@EVERY_OP
def test_near_reference(op: Op[..., Any], emulator: Emulator) -> None:
    with emulated(emulator):
        for index in range(len(examples_of(op))):
            check_near_reference(op, index)
    assert emulator.called


@EVERY_OP
def test_rows_are_independent(op: Op[..., Any], emulator: Emulator) -> None:
    with emulated(emulator):
        for index in _some(op):
            check_rows_independent(op, index)


@pytest.mark.slow
@EVERY_OP
def test_rows_are_independent_in_every_example(op: Op[..., Any], emulator: Emulator) -> None:
    with emulated(emulator):
        for index in range(len(examples_of(op))):
            check_rows_independent(op, index)


@pytest.mark.skipif("avx2" not in cpu.paths(), reason="this processor has no AVX2 to compare with")
def test_integer_products_are_those_of_avx2(emulator: Emulator) -> None:
    """Integers are exact, and both paths add the groups in the same order with fused products."""
    if emulator.path == "generic":
        pytest.skip("has no fused product")
    for index, example in enumerate(examples_of(ops.packed_linear)):
        if example["x_bits"] == 0:
            continue
        with cpu.override_path("avx2"):
            wanted = ops.packed_linear(**example)
        with emulated(emulator):
            got = ops.packed_linear(**example)
        assert same_bits(got, wanted), f"example {index}"


def _planes(ggml_type: int, raw: np.ndarray, order: np.ndarray, width: int) -> list[torch.Tensor]:
    weight = ops.PackedWeight.empty(ops.FORMATS[GGML_TYPES[ggml_type].name], len(order), width)
    planes = [weight.codes, weight.high, weight.scales, weight.supers]
    for plane in planes:
        plane.zero_()
    pack_into(weight, 0, ggml_type, raw, order)
    return planes


BLOCKS = [n for n, kind in GGML_TYPES.items() if kind.name in ops.FORMATS and find_grid_format(kind.name) is None]


@pytest.mark.parametrize("ggml_type", BLOCKS)
def test_packing_moves_the_same_bytes(ggml_type: int, emulator: Emulator) -> None:
    kind, generator = GGML_TYPES[ggml_type], np.random.default_rng(ggml_type)
    raw = generator.integers(0, 256, (40, 512 // kind.block_size * kind.block_bytes), dtype=np.uint8)
    order = generator.permutation(40)[:37].astype(np.int64)
    wanted = _planes(ggml_type, raw, order, 512)
    with emulated(emulator) as regions:
        for array in (raw, order):
            regions.note(array.ctypes.data, array.nbytes)
        got = _planes(ggml_type, raw, order, 512)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, wanted))
    assert "pack" in emulator.called


def test_every_kernel_is_called(emulator: Emulator) -> None:
    """Packing and exchanges between ranks aside, which have no ops, the ops' examples leave no kernel out."""
    with emulated(emulator):
        for op in WITH_BODY:
            op(**example_of(op, 0))
    assert emulator.called | {"pack"} == {kernel.name for kernel in KERNELS if not kernel.name.startswith("mesh_")}


def test_the_processor_decides() -> None:
    build()
    assert paths_of(PROCESSORS["generic"]) == ["generic"]
    assert paths_of(PROCESSORS["neon"]) == ["generic", "neon"]


def test_a_wrong_kernel_is_noticed(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the emulator computes is what is compared, not what was there before."""
    right = Emulator.call

    def forgetful(self: Emulator, kernel: Any, regions: Any, *args: Any) -> int:
        return right(self, kernel, regions, *args) if kernel.name != "rms_norm" else 0

    monkeypatch.setattr(Emulator, "call", forgetful)
    with emulated(emulator), pytest.raises(AssertionError):
        for index in range(len(examples_of(ops.rms_norm))):
            check_near_reference(ops.rms_norm, index)
