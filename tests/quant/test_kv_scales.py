"""Scales of keys and values in a folder: no cache uses them, and one line says so."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.api.idle_options import tell_kv_scales
from penstock.models.files import open_checkpoint
from tests.models.oracle import make, save
from tests.quant import writers
from tests.quant.test_folders import LIKE

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same weights without scales, and with those that two writers name."""
    folder = tmp_path_factory.mktemp("kv")
    plain, bare, scaled = (folder / name for name in ("plain", "bare", "scaled"))
    save(make("LlamaForCausalLM", LIKE), plain)
    method = writers.float_quantized("channel")
    writers.quantize_folder(plain, bare, method)
    method.settings["kv_cache_scheme"] = SCHEME
    writers.quantize_folder(plain, scaled, method)
    tensors = load_file(scaled / "model.safetensors")
    for layer, (key, value) in enumerate([("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")]):
        tensors[f"model.layers.{layer}.self_attn.{key}"] = torch.tensor([0.125 * (layer + 1)])
        tensors[f"model.layers.{layer}.self_attn.{value}"] = torch.tensor(0.03125, dtype=torch.bfloat16)
    save_file(tensors, scaled / "model.safetensors")
    return bare, scaled


def answer(folder: Path, **options: Any) -> Any:
    common: dict[str, Any] = dict(progress=False, threads=1, kv_cache_tokens=256, skip_tokenizer_init=True)
    with LLM(str(folder), **common, **options) as llm:
        one = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=5, logprobs=2), use_tqdm=False)[0]
    return one.outputs[0].token_ids, one.outputs[0].logprobs


@pytest.mark.parametrize("kept", ["auto", "int8", "int4"])
def test_they_change_nothing_and_one_line_says_so(
    folders: tuple[Path, Path], kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    bare, scaled = folders
    with caplog.at_level(logging.INFO, "penstock"):
        expected = answer(bare, kv_cache_dtype=kept)
        assert not [record for record in caplog.records if "scales of keys" in record.getMessage()]
        assert answer(scaled, kv_cache_dtype=kept) == expected
    (told,) = [record.getMessage() for record in caplog.records if "scales of keys" in record.getMessage()]
    assert told.startswith(f"{scaled}: 4 scales of keys and values (0.0312 to 0.25) have no effect: ")
    assert ("a float16 cache needs none" if kept == "auto" else f"an {kept} cache has its own") in told


def test_an_fp8_cache_says_where_it_clamps(folders: tuple[Path, Path]) -> None:
    settings: Any = SimpleNamespace(kv_cache_dtype="fp8")
    told = tell_kv_scales(open_checkpoint(folders[1]), settings)
    assert told.endswith("have no effect: an fp8 cache has none, and clamps at 448")
    assert tell_kv_scales(open_checkpoint(folders[0]), settings) == tell_kv_scales(None, settings) == ""
