"""Quantized folders as a GPU holds them: 8-bit floats in their own codes, and the bytes that are counted beforehand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.api.engine.load import META, load_weights
from penstock.config import EngineConfig, Facts, GpuFacts, resolve
from penstock.models import load
from penstock.models.decoder import Decoder, linears
from penstock.models.files import open_checkpoint
from penstock.models.files.quantized.checkpoint import keep_floats
from penstock.models.spec import spec_from_config
from penstock.ops.matmul.fp8_product import widen_groups
from penstock.passes.outline import count_packed_bytes
from penstock.quant.dense import Matrix
from penstock.quant.fp8 import Fp8, Fp8Groups
from penstock.quant.ints import Ints
from penstock.quant.permuted import Permuted, Stacked
from tests.models.oracle import make, save
from tests.quant import other_writers as others
from tests.quant import writers
from tests.quant.test_folders import LIKE, METHODS

FLOATS = {
    "float-quantized tensor": (writers.float_quantized("tensor"), Fp8),
    "float-quantized channel": (writers.float_quantized("channel"), Fp8),
    "float-quantized tensor g32": (writers.float_quantized("tensor_group"), Fp8Groups),
    "float-quantized block": (writers.float_quantized("block"), Fp8Groups),
    "fp8 block": (others.fp8("block"), Fp8Groups),
    "fp8 wide block": (others.fp8("block", 256), Fp8),  # a block's scale is that of whole rows
    "fp8 odd block": (others.fp8("block", 48), None),
    "fp8 tensor": (others.fp8("tensor"), Fp8),
    "fbgemm_fp8": (others.fp8("row"), Fp8),
    "sparse fp8": (others.sparse("fp8"), Fp8),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make("LlamaForCausalLM", LIKE), tmp_path_factory.mktemp("plain"))


def load_as_on_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> Decoder:
    """Load as for a GPU with 8-bit floats, through the CPU's references."""
    checkpoint, storage = open_checkpoint(folder), load.storage
    asked: dict[str, Any] = {"on_gpu": True, "quantization": load.PACKED, "has_fp8": True} | changed

    def on_gpu(ops: Any, take: Any, options: load.Options, kept: Any, *others: Any) -> Any:
        options = replace(options, **asked)
        return storage(ops, take, options, keep_floats(kept) if options.keeps_floats else kept, *others)

    with monkeypatch.context() as patch:
        patch.setattr(load, "storage", on_gpu)
        model = load.load_model(checkpoint, spec_from_config(checkpoint.config), dtype=torch.bfloat16)
    assert isinstance(model, Decoder)
    return model


def widen(scheme: Any) -> torch.Tensor:
    if isinstance(scheme, Fp8):
        return scheme.codes.float() * scheme.scale[:, None]
    return widen_groups(scheme.codes, scheme.scale, scheme.group)


@pytest.mark.parametrize("quantization", [load.PACKED, "fp8"])
@pytest.mark.parametrize("name", FLOATS)
def test_floats_keep_their_codes(
    name: str, quantization: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all matrices are to be of 8-bit floats: none is rounded twice."""
    method, kind = FLOATS[name]
    meant = writers.quantize_folder(plain, tmp_path, method)
    model = load_as_on_gpu(tmp_path, monkeypatch, quantization=quantization)
    found = {name: linear.scheme for name, linear, _ in linears(model)}
    for layer in range(2):
        down = found[f"layers.{layer}.mlp.down"]
        values = torch.from_numpy(meant[f"model.layers.{layer}.mlp.down_proj.weight"])
        if kind is None:
            assert not isinstance(down, Fp8 | Fp8Groups)
            continue
        assert isinstance(down, kind) and torch.equal(widen(down), values)
        assert torch.equal(down.rows(torch.tensor([5, 0])), values[[5, 0]])
        merged = found[f"layers.{layer}.mlp.gate_up"]
        parts = [meant[f"model.layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert isinstance(merged, kind) and torch.equal(widen(merged), torch.cat([torch.from_numpy(p) for p in parts]))


@pytest.mark.parametrize("changed", [{"has_fp8": False}, {"quantization": None}])
def test_a_gpu_without_8_bit_floats_widens_them(
    changed: dict[str, Any], plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And any does with an explicit dtype."""
    writers.quantize_folder(plain, tmp_path, others.fp8("block"))
    model = load_as_on_gpu(tmp_path, monkeypatch, **changed)
    assert not any(isinstance(linear.scheme, Fp8 | Fp8Groups) for _, linear, _ in linears(model))


@pytest.mark.parametrize("name", [*METHODS, "fp8 odd block"])
def test_bytes_are_counted_by_headers(name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache beside them would else be too large, or needlessly small. Zeros of 8-bit codes may turn out alike."""
    writers.quantize_folder(plain, tmp_path, METHODS[name] if name in METHODS else FLOATS[name][0])
    checkpoint = open_checkpoint(tmp_path)
    spec = spec_from_config(checkpoint.config)
    counted = count_packed_bytes(checkpoint, spec, has_fp8=True)
    if name == "sparse" or name in ("hqq 8", "hqq 2 axis 0"):
        assert counted == 0
        return
    model = load_as_on_gpu(tmp_path, monkeypatch)
    held = 0
    for _, linear, _ in linears(model):
        schemes = linear.scheme.schemes if isinstance(linear.scheme, Stacked) else [linear.scheme]
        held += sum(one.scheme.num_bytes if isinstance(one, Permuted) else one.num_bytes for one in schemes)
    rest = sum(2 * torch.Size(shape).numel() for name, shape in spec.parameters().items() if "layers." not in name)
    assert held + rest <= 1.02 * counted
    assert counted <= (1.08 if " 8" in name else 1.02) * (held + rest)


@pytest.mark.parametrize(
    ("name", "quantization", "kind"),
    [
        ("gptq 4 g32", None, Ints),
        ("fp8 block", None, Fp8Groups),
        ("fp8 block", "fp8", Fp8Groups),
        ("fp8 tensor", None, Fp8),
        ("nf4", None, Matrix),
        ("gptq 4 g32", "fp8", Fp8),
    ],
)
def test_an_outline_has_their_storage(
    name: str, quantization: str | None, kind: type, plain: Path, tmp_path: Path
) -> None:
    """Kernels are compiled ahead for what an outline multiplies: no value of the folder is read for it."""
    writers.quantize_folder(plain, tmp_path, METHODS[name])
    checkpoint = keep_floats(open_checkpoint(tmp_path))
    spec = spec_from_config(checkpoint.config)
    gpu = GpuFacts("a GPU", 80 << 30, 80 << 30, 1 << 30, 1 << 16, 1000)
    settings = resolve(EngineConfig(device="cuda", quantization=quantization), Facts(128, 1024, 8 << 30, 2, gpu=gpu))
    model = load_weights(checkpoint, spec, settings, META)
    assert isinstance(model, Decoder)
    for _, linear, _ in linears(model):
        assert type(linear.scheme) is kind
        assert all(value.is_meta for value in vars(linear.scheme).values() if isinstance(value, torch.Tensor))
