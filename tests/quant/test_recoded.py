"""Files' codes as a GPU multiplies them: the same values but for scales, minimums and middles in float16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.models import load
from penstock.models.files import open_checkpoint
from penstock.models.spec import spec_from_config
from penstock.ops import FORMATS, PackedWeight
from penstock.ops.matmul.int_product import bits_of, dequantize_ints, sets_of
from penstock.quant import recoded
from penstock.quant.coded import Coded
from penstock.quant.gguf import GGML_TYPES
from penstock.quant.ints import Ints
from penstock.quant.packed import pack
from penstock.quant.permuted import Permuted
from penstock.quant.recoded import Codes, recode, recode_matrices
from tests.models import oracle
from tests.ops.check import same_bits
from tests.ops.examples.matmul import packed_weight
from tests.quant import other_writers as others
from tests.quant import writers
from tests.quant.fused import CPU
from tests.quant.test_folders import LIKE
from tests.quant.test_packed import stored_blocks

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4")
LAYOUTS = {  # bits and sets
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", "U4_F16", "U4_F32", "U4_MIN"), (4, 2)),
    **dict.fromkeys(("Q2_K", "Q3_K"), (4, 4)),
    **dict.fromkeys(("Q5_0", "Q8_0", "IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4", "S8_F32"), (8, 0)),
    **dict.fromkeys(("Q5_1", "Q5_K", "U8_F32"), (8, 2)),
    **dict.fromkeys(("Q6_K", "IQ1", "IQ2", "IQ3_XXS", "NVFP4"), (8, 4)),
}
WIDE = torch.device("cpu")
GGML_NAMES = {each.name for each in GGML_TYPES.values()}


def values(scheme: Ints) -> torch.Tensor:
    return dequantize_ints(scheme.words, scheme.scales, scheme.num_out, scheme.num_in)


def weight_of(name: str, num_out: int, width: int) -> PackedWeight:
    """A weight of a file's blocks where a file can have them, else of random planes."""
    if name not in GGML_NAMES:
        return packed_weight(1, FORMATS[name], num_out, width)
    return pack([stored_blocks(name, num_out, width)])


def require_near(scheme: Ints, meant: torch.Tensor) -> None:
    """A scale and what is added to its codes are rounded to 11 bits each, or to 2^-24, and nothing else is."""
    sets, largest = sets_of(scheme.scales), 15 if bits_of(scheme.words) == 4 else 128
    terms = scheme.scales.float().abs()
    if sets:
        terms = terms[..., 0] * largest + terms[..., 1]
        terms = terms.permute(0, 3, 1, 2).flatten(0, 1).flatten(1).repeat_interleave(64 // sets, 1)
    else:
        terms = largest * terms.transpose(1, 2).flatten(0, 1).flatten(1).repeat_interleave(32, 1)
    error = (values(scheme) - meant).abs()
    allowed = 2.0**-11 * terms[: scheme.num_out, : scheme.num_in] + 2.0**-25 * (largest + 2)
    assert bool((error <= allowed).all()), (error - allowed).max()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_format_keeps_its_codes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in several pieces, and with outputs that fill no panel."""
    monkeypatch.setattr(recoded, "VALUES", 40 * 512)
    weight = weight_of(name, 75, 512)
    scheme = recode(CPU, [weight], None, torch.float32)
    assert isinstance(scheme, Ints)
    assert (bits_of(scheme.words), sets_of(scheme.scales)) == LAYOUTS[name]
    if name in EXACT:
        assert torch.equal(values(scheme), weight.unpack())
    require_near(scheme, weight.unpack())
    whole = recode(CPU, [weight_of(name, 64, 512)], None, torch.float32)
    assert whole is not None and whole.num_bytes == Codes((FORMATS[name],)).count_bytes(64, 512)


WIDENED = ("NF4", "BNB_FP4")


def test_all_formats_are_asked_for() -> None:
    assert {*LAYOUTS, *WIDENED} == set(FORMATS)


@pytest.mark.parametrize("name", WIDENED)
def test_what_a_gpu_would_round_is_widened(name: str) -> None:
    """Levels that are no integers."""
    weight = packed_weight(1, FORMATS[name], 16, 256)
    assert recode(CPU, [weight], None, torch.float32) is None
    assert Codes((FORMATS[name],)).count_bytes(16, 256) == 2 * 16 * 256


@pytest.mark.parametrize("names", [("Q4_K", "Q6_K"), ("Q4_0", "Q8_0"), ("Q4_K", "Q5_K", "Q8_0"), ("Q2_K", "Q4_1")])
def test_parts_of_several_formats_are_one_weight(names: tuple[str, ...]) -> None:
    """As queries, keys and values of a file have them."""
    parts = [weight_of(name, 24, 512) for name in names]
    scheme, meant = recode(CPU, parts, None, torch.float32), torch.cat([part.unpack() for part in parts])
    assert scheme is not None and scheme.num_out == 24 * len(names)
    require_near(scheme, meant)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(scheme.matmul(x), x @ values(scheme).T)
    ids = torch.tensor([30, 0])
    assert same_bits(scheme.rows(ids), values(scheme)[ids])


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**24, float("inf"), float("nan")])
def test_scales_that_float16_cannot_hold_are_not_rounded(factor: float) -> None:
    codes = torch.randint(0, 16, (8, 64), dtype=torch.uint8)
    one = Coded(codes, torch.full((8, 2), 0.01 * factor), 32, torch.full((8, 2), 3, dtype=torch.uint8), 4)
    assert recode(CPU, [pack([one])], None, torch.float32) is None
    assert recode_matrices(CPU, [one], None, torch.float32, WIDE) is None


def test_widths_of_an_odd_number_of_groups() -> None:
    """The last pair is half padding."""
    codes = torch.randint(0, 16, (10, 96), dtype=torch.uint8)
    one = Coded(codes, torch.rand(10, 3).half(), 32, torch.randint(0, 16, (10, 3), dtype=torch.uint8), 4)
    scheme = recode(CPU, [pack([one])], torch.ones(10), torch.float32)
    assert scheme is not None
    require_near(scheme, one.widen())
    assert torch.equal(scheme.matmul(torch.zeros(1, 96)), torch.ones(1, 10))


METHODS = {
    "gptq int4 g32": (others.gptq(4, 32, symmetric=False, order=True), Permuted),
    "gptq int8 g32": (others.gptq(8, 32), Ints),
    "awq int4 g64": (others.awq(64), Ints),
    "compressed-tensors int8": (writers.int_quantized("channel"), Ints),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_folder_stays_packed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded as for a GPU, all linears keep their codes, and multiply as widened ones do."""
    method, kind = METHODS[name]
    plain = oracle.save(oracle.make("LlamaForCausalLM", LIKE), tmp_path / "plain")
    writers.quantize_folder(plain, tmp_path / "quantized", method, skip=())
    checkpoint = open_checkpoint(tmp_path / "quantized")
    spec, storage = spec_from_config(checkpoint.config), load.storage

    def on_gpu(ops: Any, take: Any, options: load.Options, *others: Any) -> Any:
        return storage(ops, take, replace(options, on_gpu=True, quantization=load.PACKED), *others)

    wide = load.load_model(checkpoint, spec, dtype=torch.float32)
    monkeypatch.setattr(load, "storage", on_gpu)
    kept = load.load_model(checkpoint, spec, dtype=torch.float32)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    for block, other in zip(kept.blocks, wide.blocks):
        pairs = zip(block.mixer.linears(), other.mixer.linears())
        for (_, linear), (_, meant) in pairs:
            assert isinstance(linear.scheme, kind) and linear.scheme.num_bytes < meant.scheme.num_bytes / 3
            near, exact = linear.scheme.matmul(x), meant.scheme.matmul(x)
            assert (near - exact).norm() <= 1e-3 * exact.norm()
