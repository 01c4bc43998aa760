"""Quantized folders that cannot be read: one line with the file, the tensor, the limit and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import InvalidModel
from penstock.models.files import open_checkpoint
from penstock.models.load import load_model
from penstock.models.spec import spec_from_config
from tests.models.oracle import make, save
from tests.quant import other_writers as others
from tests.quant import writers
from tests.quant.test_folders import LIKE

Damage = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
MODULE = "model.layers.0.mlp.up_proj"


def drop(part: str) -> Damage:
    return lambda tensors, config: void(tensors.pop(f"{MODULE}.{part}"))


def void(_: Any) -> None: ...


def replace(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def damage(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors[f"{MODULE}.{part}"] = change(tensors[f"{MODULE}.{part}"]).contiguous()

    return damage


def add(part: str, value: torch.Tensor) -> Damage:
    return lambda tensors, config: tensors.update({f"{MODULE}.{part}": value})


def setting(key: str, value: Any) -> Damage:
    return lambda tensors, config: config.update({key: value})


GPTQ, AWQ, PACK, W8A8 = (
    others.gptq(4, 32, order=True),
    others.awq(32),
    writers.pack_quantized(4, 32, symmetric=False),
    (writers.int_quantized("channel", symmetric=False)),
)
FP8, BNB, HQQ, SPARSE = others.fp8("block"), others.bitsandbytes("nf4", nested=True), others.hqq(4, 64), others.sparse()
STATE = "weight.quant_state.bitsandbytes__nf4"

CASES: dict[str, tuple[writers.Method, Damage, str]] = {
    "unknown method": (
        GPTQ,
        setting("quant_method", "quip"),
        "quant_method='quip' is unknown: the known ones are awq,",
    ),
    "no method": (GPTQ, setting("quant_method", None), "quant_method='None' is unknown"),
    "unknown key": (GPTQ, setting("rotation", "hadamard"), "rotation='hadamard' is unknown and may change the results"),
    "bits": (GPTQ, setting("bits", 5), "bits=5 is not supported: the known ones are 2, 3, 4, 8"),
    "other bits": (GPTQ, setting("bits", 8), r"up_proj.qzeros' .* not that of 192 outputs' zeros of 8 bits|qzeros"),
    "group size": (GPTQ, setting("group_size", 0), "group_size=0 must be -1 for whole rows"),
    "other groups": (GPTQ, setting("group_size", 64), "has 6 groups, not those of group_size=64 of 192 inputs"),
    "marlin": (GPTQ, setting("is_marlin_format", True), "is_marlin_format=True is not supported"),
    "no scales": (GPTQ, drop("scales"), "'model.layers.0.mlp.up_proj.qweight' lacks its part '.*up_proj.scales'"),
    "no zeros": (GPTQ, drop("qzeros"), "lacks its part '.*up_proj.qzeros'"),
    "no weight": (GPTQ, drop("qweight"), "is a part of a quantized matrix, which quant_method=gptq does not have"),
    "scales of integers": (GPTQ, replace("scales", lambda x: x.int()), "holds int32, where float16 or bfloat16"),
    "scales of a shape": (GPTQ, replace("scales", lambda x: x[:, 1:]), r"scales' has shape \[4, 191\]"),
    "weight of floats": (
        GPTQ,
        replace("qweight", lambda x: x.float()),
        "qweight' holds float32, where int32 is needed",
    ),
    "group out of range": (GPTQ, replace("g_idx", lambda x: x + 1), "g_idx' holds 4, where 0 to 3 are possible"),
    "negative group": (GPTQ, replace("g_idx", lambda x: -x), "g_idx' holds -3, where 0 to 3 are possible"),
    "short groups": (GPTQ, replace("g_idx", lambda x: x[1:]), r"g_idx' has shape \[127\], where \[128\] is needed"),
    "mixed methods": (GPTQ, add("weight_packed", torch.zeros(1)), "weight_packed' is a part of .* or of two methods"),
    "plain too": (GPTQ, add("weight", torch.zeros(192, 128)), "is stored both plain and quantized"),
    "gemv": (AWQ, setting("version", "gemv"), "version='gemv' is another order of weights than gemm"),
    "gemv format": (AWQ, setting("format", "gemv"), "format='gemv' is another order of weights than gemm"),
    "awq groups": (AWQ, setting("group_size", 80), "has 192 inputs, which group_size=80 does not divide"),
    "awq bits": (AWQ, setting("bits", 8), "bits=8 is not supported: only 4 is"),
    "awq zeros": (AWQ, replace("qzeros", lambda x: x[1:]), r"qzeros' has shape \[3, 24\], where \[4, 24\] is needed"),
    "marlin-24": (
        PACK,
        setting("format", "marlin-24"),
        "format='marlin-24' is one GPU kernel's order .* pack-quantized",
    ),
    "unknown format": (PACK, setting("format", "mxfp6"), "format='mxfp6' is not supported: the known values are dense"),
    "transform": (PACK, setting("transform_config", {"a": 1}), "transform_config=.* is unknown and may change"),
    "no shape": (PACK, drop("weight_shape"), "lacks its part '.*weight_shape'"),
    "no zero points": (PACK, drop("weight_zero_point"), "lacks its part '.*weight_zero_point'"),
    "another shape": (
        PACK,
        replace("weight_shape", lambda x: x * 2),
        r"which is not that of 384 × 256 codes of 4 bits",
    ),
    "indivisible": (
        PACK,
        lambda t, c: c["config_groups"]["group_0"]["weights"].update(group_size=80),
        r"config_groups allow none for a matrix \[128, 192\] \(group_size=80 does not divide 192 inputs\)",
    ),
    "blocks of integers": (
        W8A8,
        lambda t, c: c["config_groups"]["group_0"]["weights"].update(strategy="block", block_structure=[64, 64]),
        "strategy='block' is read for 8-bit floats only: save integers with strategy group or channel",
    ),
    "zero points": (W8A8, replace("weight_zero_point", lambda x: x[1:]), r"has shape \[191, 1\], where"),
    "fp8 without scales": (FP8, drop("weight_scale_inv"), "lacks its part '.*weight_scale'"),
    "fp8 blocks": (
        FP8,
        setting("weight_block_size", [64, 64]),
        r"weight_scale_inv' has shape .*, where \[.*\] is needed",
    ),
    "fp8 block sizes": (FP8, setting("weight_block_size", [0, 64]), "must be a list of two sizes from 1 to 65536"),
    "no absmax": (BNB, drop("weight.absmax"), "lacks its part '.*absmax'"),
    "no state": (BNB, drop(STATE), "which quant_method=bitsandbytes does not have"),
    "damaged state": (BNB, replace(STATE, lambda x: x[1:]), "is damaged: it is not valid JSON"),
    "table": (BNB, replace("weight.quant_map", lambda x: x + 0.1), "quant_map' is not the table of nf4"),
    "short codes": (BNB, replace("weight", lambda x: x[1:]), "does not hold 192 × 128 codes"),
    "hqq scales": (HQQ, add("quant_scale", torch.tensor(1)), "has scales that are quantized too"),
    "hqq zero": (HQQ, replace("zero", lambda x: x[1:]), r"zero' has shape \[383, 1\]"),
    "not 2:4": (SPARSE, replace("bitmask", lambda x: x | 7), "keeps another number than 64 of a row's 128 values"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make("LlamaForCausalLM", LIKE | {"num_hidden_layers": 1}), tmp_path_factory.mktemp("plain"))


def write_damaged(plain: Path, folder: Path, method: writers.Method, damage: Damage) -> None:
    writers.quantize_folder(plain, folder, method)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    damage(tensors, config["quantization_config"])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", CASES)
def test_damage_is_refused_by_name(name: str, plain: Path, tmp_path: Path) -> None:
    method, damage, reason = CASES[name]
    write_damaged(plain, tmp_path, method, damage)
    with pytest.raises(InvalidModel, match=reason) as caught:
        checkpoint = open_checkpoint(tmp_path)
        load_model(checkpoint, spec_from_config(checkpoint.config), dtype=None)
    message = str(caught.value)
    assert message.startswith(str(tmp_path)) and "\n" not in message and len(message) < 700


def test_a_truncated_shard_is_refused(plain: Path, tmp_path: Path) -> None:
    writers.quantize_folder(plain, tmp_path, GPTQ)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(InvalidModel, match="the tensors take .* bytes, the file has .*fetch it again"):
        open_checkpoint(tmp_path)


def test_a_folder_without_its_settings_is_refused(plain: Path, tmp_path: Path) -> None:
    writers.quantize_folder(plain, tmp_path, AWQ)
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModel, match="is a part of a quantized matrix, without a quantization_config"):
        open_checkpoint(tmp_path)
    del settings["quant_method"]
    (tmp_path / "quant_config.json").write_text(json.dumps(settings))  # as older folders have it
    assert open_checkpoint(tmp_path).quantization == "awq int4 g32"


def test_what_does_not_matter_is_tolerated(plain: Path, tmp_path: Path) -> None:
    def extend(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
        tensors["model.layers.0.self_attn.v_proj.output_scale"] = torch.tensor([0.5])
        config.update(kv_cache_scheme={"num_bits": 8}, version="0.9", ignore=["lm_head", "re:.*gate$"])

    write_damaged(plain, tmp_path, W8A8, extend)
    names = open_checkpoint(tmp_path).names()
    assert not any("scale" in name for name in names) and f"{MODULE}.weight" in names
