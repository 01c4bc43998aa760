"""Our dequantization against the `gguf` package's own, bit for bit, on random bytes (every scale, code and sign)."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from penstock.errors import InvalidModel
from penstock.quant import gguf as ours
from penstock.quant.gguf import GGML_TYPES, dequantize, num_bytes

TYPES = sorted(GGML_TYPES)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal bit patterns; any two NaNs are equal (which of two NaN operands survives is the processor's choice)."""
    nan = np.isnan(left) & np.isnan(right)
    return bool(np.all((left.view(np.uint32) == right.view(np.uint32)) | nan))


def oracle(raw: np.ndarray, ggml_type: int, shape: tuple[int, ...]) -> np.ndarray:
    with np.errstate(all="ignore"):
        rows = raw.reshape(*shape[:-1], -1)
        return np.ascontiguousarray(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(ggml_type)), np.float32)


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda number: GGML_TYPES[number].name)
@pytest.mark.parametrize("shape", [(1, 256), (3, 512), (5, 7, 256), (300, 1024)], ids=str)
def test_equals_the_gguf_package(ggml_type: int, shape: tuple[int, ...]) -> None:
    raw = np.random.default_rng(ggml_type).integers(0, 256, num_bytes(ggml_type, shape), dtype=np.uint8)
    values = dequantize(raw, ggml_type, shape)
    assert values.dtype == np.float32 and values.shape == shape
    assert same_bits(values, oracle(raw, ggml_type, shape))


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda number: GGML_TYPES[number].name)
def test_every_byte_value_at_every_place(ggml_type: int) -> None:
    """One block per (place, byte value), the others as in a random block: a wrong shift or mask shows here."""
    width = GGML_TYPES[ggml_type].block_bytes
    raw = np.tile(np.random.default_rng(1).integers(0, 256, width, dtype=np.uint8), (width * 256, 1))
    places, values = np.divmod(np.arange(width * 256), 256)
    raw[np.arange(width * 256), places] = values
    shape = (width * 256, GGML_TYPES[ggml_type].block_size)
    assert same_bits(dequantize(raw.ravel(), ggml_type, shape), oracle(raw.ravel(), ggml_type, shape))


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda number: GGML_TYPES[number].name)
def test_block_sizes_are_the_formats(ggml_type: int) -> None:
    kind = GGML_TYPES[ggml_type]
    assert gguf.GGMLQuantizationType(ggml_type).name == kind.name
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type)] == (kind.block_size, kind.block_bytes)


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.random.default_rng(3).integers(0, 256, num_bytes(14, (9, 512)), dtype=np.uint8)
    whole = dequantize(raw, 14, (9, 512))
    monkeypatch.setattr(ours, "CHUNK_VALUES", 256 * 5)
    assert same_bits(dequantize(raw, 14, (9, 512)), whole)


def test_known_values_survive_a_round_trip() -> None:
    weight = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    raw = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    assert np.abs(dequantize(raw.ravel(), 8, (2, 32)) - weight).max() < 1 / 127


def test_refusals_name_the_type_and_the_size() -> None:
    with pytest.raises(InvalidModel, match="15 .Q8_K. is not supported; use a file of one of these: F32"):
        dequantize(np.zeros(292, np.uint8), 15, (1, 256))
    with pytest.raises(InvalidModel, match="255 .unknown."):
        num_bytes(255, (1,))
    with pytest.raises(InvalidModel, match="Q4_K blocks of 256"):
        num_bytes(12, (4, 255))
    with pytest.raises(InvalidModel, match="takes 34 bytes, not 33"):
        dequantize(np.zeros(33, np.uint8), 8, (32,))
