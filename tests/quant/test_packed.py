"""Packing a file's blocks loses nothing, whatever their type, order and neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock import ops
from penstock.ops import cpu
from penstock.quant.gguf import GGML_TYPES, dequantize
from penstock.quant.grid_planes import find_grid_format
from penstock.quant.ints import quantize
from penstock.quant.packed import GgmlMatrix, Packed, pack
from tests.ops.check import same_bits
from tests.quant.fused import CPU

TYPES = {
    kind.name: number
    for number, kind in GGML_TYPES.items()
    if kind.name in ops.FORMATS or find_grid_format(kind.name) is not None
}
WIDENED = ("Q2_K", "Q3_K")


def stored_blocks(name: str, num_rows: int, width: int, seed: int = 0, order: np.ndarray | None = None) -> GgmlMatrix:
    """Random blocks; every float16 in them is made finite."""
    kind = GGML_TYPES[TYPES[name]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (num_rows, width // kind.block_size, kind.block_bytes), dtype=np.uint8)
    halves = {
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "TQ1_0": (52,),
        "TQ2_0": (64,),
        "IQ1_M": (),
        "NVFP4": (),
    }.get(name, (0,))
    for at in halves:
        values = generator.normal(0, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = values[..., None].view(np.uint8)
    if name == "IQ1_M":
        blocks[..., 55] = blocks[..., 55] & 15 | 32  # the highest bits of a scale of about 0.01
    if name == "NVFP4":
        blocks[..., :4] &= 127
    if name == "MXFP4":
        blocks[..., 0] = generator.integers(104, 144, blocks.shape[:2])
    return GgmlMatrix(TYPES[name], blocks.reshape(num_rows, -1), width, order)


def _meant(stored: GgmlMatrix) -> torch.Tensor:
    values = dequantize(stored.raw.ravel(), stored.ggml_type, (len(stored.raw), stored.width))
    return torch.from_numpy(values if stored.order is None else values[stored.order])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_every_type_is_packed_exactly(name: str, num_rows: int, path: str) -> None:
    stored = stored_blocks(name, num_rows, 512)
    weight = pack([stored])
    assert same_bits(weight.unpack(), _meant(stored))
    ids = torch.tensor([num_rows - 1, 0])
    assert same_bits(Packed(CPU, [weight]).rows(ids), _meant(stored)[ids])


@pytest.mark.parametrize("name", TYPES)
def test_packed_bytes_are_those_of_the_file(name: str) -> None:
    """Codes of a grid, and those of two or three bits, take four."""
    stored = stored_blocks(name, 64, 1024)
    num_bytes = pack([stored]).num_bytes
    if find_grid_format(name) is not None:
        assert num_bytes <= 64 * 1024 * (0.76 if name == "NVFP4" else 0.64)
    else:
        assert num_bytes <= stored.raw.nbytes * (1.1 if name not in WIDENED else 2)


def test_rows_in_another_order_and_parts_that_share_a_panel(path: str) -> None:
    parts = [
        stored_blocks("Q4_1", 20, 64, 1, np.random.default_rng(1).permutation(20)),
        stored_blocks("Q4_1", 9, 64, 2),
        stored_blocks("Q8_0", 30, 64, 3),
        stored_blocks("Q4_1", 7, 64, 4),
    ]
    scheme = Packed.from_stored(CPU, parts, None, x_bits=0)
    assert [part.num_out for part in scheme.parts] == [29, 30, 7]
    meant = torch.cat([_meant(part) for part in parts])
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(scheme.rows(torch.arange(66)), meant)
    torch.testing.assert_close(scheme.matmul(x), x @ meant.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q6_K", "IQ4_XS", "Q5_0"])
def test_all_paths_give_the_same_bits(name: str) -> None:
    """Integers are exact and every path sums the groups in the same order, so unlike elsewhere not a bit differs."""
    weight = pack([stored_blocks(name, 48, 512)])
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(1))
    results = []
    for each in cpu.paths()[1:]:
        if each == "generic":
            continue  # has no fused product
        with cpu.override_path(each):
            results.append(Packed(CPU, [weight]).matmul(x))
    assert all(same_bits(results[0], other) for other in results)


@pytest.mark.parametrize("name", TYPES)
def test_rounded_activations_stay_close_to_float_ones(name: str, path: str) -> None:
    weight = pack([stored_blocks(name, 32, 512)])
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(1))
    near, exact = (Packed(CPU, [weight], x_bits=x_bits).matmul(x) for x_bits in (8, 0))
    assert (near - exact).norm() / exact.norm() < 0.01
    nearest = Packed(CPU, [weight], x_bits=16).matmul(x)
    assert 0 < (nearest - exact).norm() / exact.norm() < 1e-4 < (near - exact).norm() / exact.norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_shows(value: float, path: str) -> None:
    weight = pack([stored_blocks("Q4_1", 16, 64)])
    x = torch.ones(3, 64)
    x[1, 40] = value
    y = Packed(CPU, [weight]).matmul(x)
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.007), ("int4", 0.08)])
@pytest.mark.parametrize("width", [256, 80])
def test_quantizing_at_load(quantization: str, error: float, width: int) -> None:
    weight = torch.randn(50, width, generator=torch.Generator().manual_seed(2)) * 0.02
    weight[3] = 0.0
    packed = pack([quantize(weight, quantization)]).unpack()
    assert packed.shape == weight.shape and torch.equal(packed[3], weight[3])
    assert (packed - weight).norm() / weight.norm() < error


def test_a_row_outside_the_file_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        pack([stored_blocks("Q4_0", 4, 32, order=np.array([0, 4]))])
