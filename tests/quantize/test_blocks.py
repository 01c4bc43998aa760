"""GGUF blocks against the `gguf` package, and K-quants against the errors of llama.cpp's quantizer."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from penstock.errors import InvalidConfig
from penstock.quant.gguf import dequantize
from penstock.quantize.gguf.blocks import ENCODERS, TYPES, encode

# Root mean square errors of ggml's own quantizer (ggml 0.5.0, ggml_quantize_chunk) on the matrices below: without
# importance, and with it, errors weighted by it.
GGML = {
    ("normal", "Q2_K"): (0.0148219, 0.0056093),
    ("normal", "Q3_K"): (0.00751949, 0.00322134),
    ("normal", "Q4_K"): (0.00356641, 0.0015638),
    ("normal", "Q5_K"): (0.00180968, 0.000798936),
    ("normal", "Q6_K"): (0.000885303, 0.000389439),
    ("normal", "Q4_0"): (0.00429755, 0.0018745),
    ("normal", "Q4_1"): (0.00390364, 0.00153554),
    ("normal", "Q5_0"): (0.00213216, 0.000930594),
    ("normal", "Q5_1"): (0.00188764, 0.000747177),
    ("heavy", "Q2_K"): (0.0241956, 0.00901536),
    ("heavy", "Q3_K"): (0.012994, 0.00563713),
    ("heavy", "Q4_K"): (0.00608196, 0.00270762),
    ("heavy", "Q5_K"): (0.00308422, 0.00139619),
    ("heavy", "Q6_K"): (0.00160009, 0.000717584),
    ("heavy", "Q4_0"): (0.00819328, 0.00370582),
    ("heavy", "Q4_1"): (0.00655235, 0.00263225),
    ("heavy", "Q5_0"): (0.00406246, 0.001845),
    ("heavy", "Q5_1"): (0.00317804, 0.00128036),
}
SIMPLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def matrix(kind: str) -> np.ndarray:
    random = np.random.default_rng(7)
    values = random.standard_normal((96, 1024)) if kind == "normal" else random.standard_t(4, (96, 1024))
    return (values * 0.05).astype(np.float32)


def importance() -> np.ndarray:
    return (np.random.default_rng(8).random(1024) ** 3 + 0.01).astype(np.float32)


def decode(raw: np.ndarray, name: str) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_both_readers_agree_on_what_was_written(name: str, weighted: bool) -> None:
    weight = torch.from_numpy(matrix("heavy"))
    weight[3] = 0
    weight[4] = 0.25
    weight[5] = -1.5
    raw = encode(weight, name, torch.from_numpy(importance()) if weighted else None)
    ours = dequantize(raw.reshape(-1), TYPES[name], tuple(weight.shape))
    assert np.array_equal(ours, decode(raw, name))
    assert not ours[3].any()
    assert np.abs(ours[4] - 0.25).max() < 0.04 and np.abs(ours[5] + 1.5).max() < 0.25


@pytest.mark.parametrize("name", SIMPLE)
def test_simple_types_are_the_same_bytes_as_the_gguf_packages(name: str) -> None:
    values = matrix("heavy")
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    assert np.array_equal(encode(torch.from_numpy(values), name), expected.view(np.uint8).reshape(len(values), -1))


@pytest.mark.parametrize("kind, name", GGML)
def test_errors_are_at_most_two_percent_above_llama_cpps(kind: str, name: str) -> None:
    values, weights = matrix(kind), importance()
    plain = decode(encode(torch.from_numpy(values), name), name) - values
    weighted = decode(encode(torch.from_numpy(values), name, torch.from_numpy(weights)), name) - values
    assert np.sqrt(np.square(plain).mean()) <= 1.02 * GGML[kind, name][0]
    assert np.sqrt((np.square(weighted) * weights).mean()) <= 1.02 * GGML[kind, name][1]


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K"])
def test_what_a_type_can_say_is_said_again(name: str) -> None:
    """Rounding twice loses nothing more: the second search finds the first one's grid."""
    once = decode(encode(torch.from_numpy(matrix("normal")), name), name)
    twice = decode(encode(torch.from_numpy(once), name), name)
    assert np.sqrt(np.square(twice - once).mean()) < 0.05 * np.sqrt(np.square(once - matrix("normal")).mean())


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(InvalidConfig, match="Q4_K has blocks of 256 values, which rows of 576"):
        encode(torch.zeros(2, 576), "Q4_K")
