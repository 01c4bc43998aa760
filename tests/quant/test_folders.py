"""Quantized folders: every tensor is what its method defines, and the model runs on its codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.models.files import open_checkpoint
from penstock.models.files.quantized.checkpoint import is_requantized, requantize_floats
from penstock.models.load import load_model
from penstock.models.spec import spec_from_config
from penstock.quant.coded import Coded, pack_matrices
from penstock.quant.packed import GgmlMatrix, pack
from tests.models.oracle import make, save
from tests.quant import other_writers as others
from tests.quant import writers

LIKE = dict(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
METHODS = {
    "pack-quantized 4 g32": writers.pack_quantized(4, 32),
    "pack-quantized 4 g64 asymmetric": writers.pack_quantized(4, 64, symmetric=False),
    "pack-quantized 4 channel bfloat16": writers.pack_quantized(4, 0, dtype="bfloat16"),
    "pack-quantized 4 g32 float32": writers.pack_quantized(4, 32, dtype="float32"),
    "pack-quantized 4 g32 ordered": writers.pack_quantized(4, 32, order=True),
    "pack-quantized 4 tensor g32": writers.pack_quantized(4, 32, strategy="tensor_group"),
    "pack-quantized 3 g32": writers.pack_quantized(3, 32),
    "pack-quantized 6 g64 in 8": writers.pack_quantized(6, 64, symmetric=False),
    "pack-quantized 5 in 8": writers.pack_quantized(5, 0),
    "pack-quantized 8 g64": writers.pack_quantized(8, 64),
    "pack-quantized 8 asymmetric": writers.pack_quantized(8, 0, symmetric=False),
    "int-quantized channel": writers.int_quantized("channel"),
    "int-quantized tensor bfloat16": writers.int_quantized("tensor", dtype="bfloat16"),
    "int-quantized asymmetric": writers.int_quantized("channel", symmetric=False),
    "float-quantized tensor": writers.float_quantized("tensor"),
    "float-quantized channel": writers.float_quantized("channel"),
    "float-quantized tensor g32": writers.float_quantized("tensor_group"),
    "float-quantized block": writers.float_quantized("block"),
    **{f"gptq {bits} g32": others.gptq(bits, 32) for bits in (2, 3, 4, 8)},
    "gptq 4 channel": others.gptq(4, -1),
    "gptq 4 g128 over rows of 192": others.gptq(4, 128),
    **{f"gptq {bits} g64 asymmetric": others.gptq(bits, 64, symmetric=False) for bits in (2, 3, 4, 8)},
    "gptq 4 g32 ordered": others.gptq(4, 32, order=True),
    "gptq 4 g64 v2 asymmetric ordered": others.gptq(4, 64, symmetric=False, order=True, v2=True),
    "awq 4 g32": others.awq(32),
    "awq 4 g64": others.awq(64),
    "fp8 block": others.fp8("block"),
    "fp8 tensor": others.fp8("tensor"),
    "fbgemm_fp8": others.fp8("row"),
    "nf4": others.bitsandbytes("nf4"),
    "nf4 nested": others.bitsandbytes("nf4", nested=True),
    "fp4": others.bitsandbytes("fp4"),
    "llm.int8 8": others.llm_int8(),
    "hqq 4": others.hqq(4, 64),
    "hqq 2 axis 0": others.hqq(2, 32, axis=0),
    "hqq 3": others.hqq(3, 64),
    "hqq 8": others.hqq(8, 64),
    "sparse": others.sparse(),
    "sparse int8": others.sparse("int8"),
    "sparse fp8": others.sparse("fp8"),
    "nvfp4": others.nvfp4(),
    "mxfp4": others.mxfp4(),
}
ROUNDED = ("float-quantized", "fp8", "fbgemm", "sparse fp8", "hqq 8", "hqq 2 axis 0")  # to integers of 8 bits


def is_coded(name: str) -> bool:
    return not name.startswith(ROUNDED) and name != "sparse"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make("LlamaForCausalLM", LIKE), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", METHODS)
def test_every_tensor_is_what_its_method_defines(name: str, plain: Path, tmp_path: Path) -> None:
    meant = writers.quantize_folder(plain, tmp_path, METHODS[name])
    before, after = open_checkpoint(plain), open_checkpoint(tmp_path)
    assert sorted(after.names()) == sorted(before.names())
    assert len(meant) == 14
    for tensor in before.names():
        assert after.shape(tensor) == before.shape(tensor)
        if tensor not in meant:
            assert torch.equal(after.tensor(tensor), before.tensor(tensor))
            continue
        found = after.tensor(tensor)
        assert found.dtype == torch.float32 and np.array_equal(found.numpy(), meant[tensor])
        coded = after.read_codes(tensor)
        assert is_coded(name) == (coded is not None) == after.is_packed(tensor)
        assert is_requantized(after, tensor) == name.startswith(ROUNDED)
        if coded is None:
            continue
        assert isinstance(coded, Coded)
        planes = pack_matrices([coded]).unpack()
        planes = planes if coded.order is None else torch.empty_like(planes).index_copy_(1, coded.order, planes)
        if coded.has_fractions:  # a zero times its scale is rounded to float32
            torch.testing.assert_close(planes, found, rtol=1e-6, atol=1e-6 * float(found.abs().max()))
        else:
            assert torch.equal(planes, found)


@pytest.mark.parametrize("name", [name for name in METHODS if name.startswith(ROUNDED)])
def test_eight_bit_floats_are_near_as_integers(name: str, plain: Path, tmp_path: Path) -> None:
    """A value is at most half a step away: 1/254 of the largest of its 32, and what float16 takes from the scale."""
    meant = writers.quantize_folder(plain, tmp_path, METHODS[name])
    checkpoint = requantize_floats(open_checkpoint(tmp_path))
    assert checkpoint is not None
    for tensor, values in meant.items():
        stored = checkpoint.read_codes(tensor)
        assert isinstance(stored, GgmlMatrix)
        error, groups = (pack([stored]).unpack() - torch.from_numpy(values)).abs(), torch.from_numpy(values)
        largest = groups.view(len(groups), -1, 32).abs().amax(-1).repeat_interleave(32, 1)
        assert bool((error <= largest / 254 * 1.002).all())


def find_share(name: str) -> float:
    """Bytes a value, at most."""
    if name == "sparse":
        return 2
    if name.startswith(ROUNDED):
        return 1.1
    return 1.35 if " 8" in name or "int" in name.replace("int4", "") else 0.85


@pytest.mark.parametrize("name", METHODS)
def test_a_model_stays_packed(name: str, plain: Path, tmp_path: Path) -> None:
    writers.quantize_folder(plain, tmp_path, METHODS[name])
    checkpoint = open_checkpoint(tmp_path)
    spec = spec_from_config(checkpoint.config)
    packed, wide = (load_model(checkpoint, spec, dtype=dtype) for dtype in (None, torch.float32))
    linear, plain_linear = (dict(block.mixer.linears())["qkv"].scheme for block in (packed.blocks[0], wide.blocks[0]))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    near, exact = linear.matmul(x), plain_linear.matmul(x)
    assert (near - exact).norm() / exact.norm() < 0.015
    share = find_share(name)
    assert linear.num_bytes <= share * linear.num_out * linear.num_in
