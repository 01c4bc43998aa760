"""Quantized folders as the hub has them: settings and tensors in all their spellings, read exactly or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import InvalidModel
from penstock.models.files import open_checkpoint
from penstock.models.load import load_model
from penstock.models.spec import FAMILIES, spec_from_config
from penstock.quant.bits import unpack_words
from tests.models.oracle import make, save
from tests.models.paged import Paged
from tests.quant import other_writers as others
from tests.quant import writers
from tests.quant.test_folders import LIKE
from tests.quant.writers import Array, Method

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, dict[str, Any], dict[str, Array]], None]
SKIPPED = ("lm_head",)
DENSE = ("proj", "lm_head")  # nothing is quantized
GPTQ, AWQ, PACK = others.gptq(4, 32), others.awq(32), writers.pack_quantized(4, 32)
BNB, FP8, STATIC = others.bitsandbytes("nf4", nested=True), others.fp8("block"), others.fp8("tensor")
SPARSE = others.sparse()


def mix(usual: Method, **other: Method) -> Method:
    """Modules whose names contain a key are written by another method."""

    def write(module: str, weight: Array) -> writers.Written:
        return next((each for part, each in other.items() if part in module), usual).write(module, weight)

    return Method(usual.settings, write)


def says(**settings: Any) -> Change:
    return lambda tensors, config, meant: config["quantization_config"].update(settings)


def drops(*keys: str) -> Change:
    def change(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None:
        for key in keys:
            del config["quantization_config"][key]

    return change


def lacks(part: str) -> Change:
    def change(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None:
        for name in [name for name in tensors if name.endswith(f".{part}")]:
            del tensors[name]

    return change


def both(*changes: Change) -> Change:
    def change(*found: Any) -> None:
        for each in changes:
            each(*found)

    return change


def weights_say(**settings: Any) -> Change:
    return lambda t, config, m: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(settings)


def group_format(name: str | None) -> Change:
    return lambda t, config, m: config["quantization_config"]["config_groups"]["group_0"].update(format=name)


def several_groups(*methods: Method) -> Change:
    """format: mixed-precision, each group with a format of its own and regexes for targets."""

    def change(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None:
        settings = config["quantization_config"]
        settings["format"] = "mixed-precision"
        settings["ignore"] = ["lm_head", "re:.*router.*"]
        settings["config_groups"] = {
            f"group_{at}": {
                **method.settings["config_groups"]["group_0"],
                "format": method.settings["format"],
                "targets": ["Linear", f"re:.*{at}.*"],
            }
            for at, method in enumerate(methods)
        }

    return change


def pad_words(bits: int) -> Change:
    """As older writers of compressed-tensors pack: 32 // bits codes to a word, none cut."""

    def repack(words: torch.Tensor, count: int) -> torch.Tensor:
        codes, fields = unpack_words(words, bits, count).numpy().astype(np.uint32), 32 // bits
        cut = np.pad(codes, ((0, 0), (0, -count % fields))).reshape(len(codes), -1, fields)
        packed = (cut << (np.arange(fields) * bits).astype(np.uint32)).sum(-1, dtype=np.uint32)
        return torch.from_numpy(packed.view(np.int32))

    def change(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None:
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            module = name.removesuffix(".weight_packed")
            num_out, width = tensors[f"{module}.weight_shape"].tolist()
            tensors[name], zeros = repack(tensors[name], width), f"{module}.weight_zero_point"
            if zeros in tensors:
                tensors[zeros] = repack(tensors[zeros].t().contiguous(), num_out).t()

    return change


def give_biases(value: float) -> Change:
    def change(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None:
        for name in [name for name in tensors if name.endswith(".qweight")]:
            bias = torch.full((tensors[name].shape[1],), value, dtype=torch.float16)
            tensors[f"{name.removesuffix('.qweight')}.bias"] = bias

    return change


def round_scales(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None:
    """Scales that are powers of two, in a byte each."""
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = torch.exp2(tensors[name].log2().ceil()).to(torch.float8_e8m0fnu)
        weight = name.removesuffix("_scale_inv")
        codes, scale = tensors[weight].float().numpy(), tensors[name].float().numpy()
        meant[weight] = codes * scale.repeat(32, 0).repeat(32, 1)[: len(codes), : codes.shape[1]]


def rename_static(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None:
    """One scale for a matrix, under the name that blocks have."""
    config["quantization_config"] |= {"weight_block_size": None, "modules_to_not_convert": ["vision_tower", "lm_head"]}
    for name in [name for name in tensors if name.endswith(".input_scale")]:
        module = name.removesuffix(".input_scale")
        tensors[f"{module}.activation_scale"] = tensors.pop(name)
        tensors[f"{module}.weight_scale_inv"] = tensors.pop(f"{module}.weight_scale")


def store_wide(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None:
    """bnb_4bit_quant_storage: two bytes of codes as one bfloat16."""
    config["quantization_config"]["bnb_4bit_quant_storage"] = "bfloat16"
    for name in meant:
        tensors[name] = tensors[name].flatten().view(torch.bfloat16)[:, None]


def keep_kv_scales_alone(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    settings = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense", "ignore": []}
    config["quantization_config"] = settings | {"kv_cache_scheme": scheme, "quantization_status": "frozen"}
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.1])


def freeze(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None:
    config["quantization_config"] |= {"quantization_status": "frozen", "format": "dense"}
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(192, 1)


def move_settings(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None:
    config["compression_config"] = config.pop("quantization_config")


def store_as_mlx(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None:
    config["quantization"] = config["quantization_config"] = {"group_size": 32, "bits": 4}
    for name in [name for name in tensors if name.endswith(".qweight")]:
        module = name.removesuffix(".qweight")
        tensors[f"{module}.weight"] = tensors.pop(name).view(torch.uint32)
        tensors[f"{module}.biases"] = tensors[f"{module}.scales"].clone()
        del tensors[f"{module}.qzeros"], tensors[f"{module}.g_idx"]


def spoil(part: str, value: float) -> Change:
    def change(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None:
        tensors[f"model.layers.0.mlp.up_proj.{part}"][..., 0] = value

    return change


def nothing(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None: ...


READ: dict[str, tuple[Method, Change, tuple[str, ...]]] = {
    "gptq rules for modules": (
        mix(GPTQ, up_proj=others.gptq(8, 64)),
        says(dynamic={"+:.*up_proj.*": {"bits": 8, "group_size": 64}, "-:.*gate_proj.*": {}}),
        ("lm_head", "gate_proj"),
    ),
    "gptq of all bits": (
        mix(GPTQ, up=others.gptq(8, -1), down=others.gptq(3, 64), k_=others.gptq(2, 32), o_=others.gptq(4, 64, False)),
        says(dynamic={"+:.*": {}}),
        SKIPPED,
    ),
    "gptq ordered, static groups": (GPTQ, says(desc_act=True, static_groups=True), SKIPPED),
    "gptq without g_idx": (GPTQ, lacks("g_idx"), SKIPPED),
    "gptq whole rows, ordered, without g_idx": (others.gptq(4, -1), both(lacks("g_idx"), says(desc_act=True)), SKIPPED),
    "gptq with a head": (GPTQ, says(lm_head=True), ()),
    "gptq in newer words": (
        GPTQ,
        says(format="gptq", pack_dtype="int32", meta={"quantizer": ["gptqmodel:5.7.0"], "vram_strategy": "exclusive"}),
        SKIPPED,
    ),
    "gptq in older words": (GPTQ, says(groupsize=32, actorder=False), SKIPPED),
    "gptq with biases of zeros": (GPTQ, give_biases(0), SKIPPED),
    "awq in capitals": (AWQ, says(version="GEMM", ignore=["lm_head"]), SKIPPED),
    "awq that is said to be symmetric": (AWQ, says(zero_point=False), SKIPPED),
    "awq with a head": (AWQ, says(modules_to_not_convert=[]), ()),
    "integers of two groups": (
        mix(PACK, self_attn=writers.int_quantized("channel")),
        several_groups(PACK, writers.int_quantized("channel")),
        SKIPPED,
    ),
    "floats of two groups": (
        mix(others.nvfp4(), self_attn=writers.float_quantized("channel")),
        several_groups(others.nvfp4(), writers.float_quantized("channel")),
        SKIPPED,
    ),
    "a head of codes": (PACK, nothing, ()),
    "a group's format is null": (PACK, group_format(None), SKIPPED),
    "order of calibration alone": (PACK, weights_say(actorder="weight"), SKIPPED),
    "order of calibration by its alias": (PACK, weights_say(actorder="static"), SKIPPED),
    **{
        f"words of whole codes, {bits} bits": (
            writers.pack_quantized(bits, 32, symmetric=bits % 2 == 0),
            pad_words(bits),
            SKIPPED,
        )
        for bits in (2, 3, 5, 6, 7)
    },
    "keys and values alone": (PACK, keep_kv_scales_alone, DENSE),
    "sparse without a method": (SPARSE, drops("quant_method", "config_groups"), SKIPPED),
    "sparse, compression_config": (SPARSE, move_settings, SKIPPED),
    "bitsandbytes without a method": (BNB, drops("quant_method"), SKIPPED),
    "bitsandbytes in words": (BNB, store_wide, SKIPPED),
    "bitsandbytes with a head": (BNB, nothing, ()),
    "llm.int8": (others.llm_int8(), says(llm_int8_skip_modules=["lm_head"], llm_int8_has_fp16_weight=False), SKIPPED),
    "fp8 scales of powers": (FP8, round_scales, SKIPPED),
    "fp8 static": (STATIC, rename_static, SKIPPED),
    "fp8 of AutoFP8": (STATIC, says(ignored_layers=["re:.*lm_head"], kv_cache_scheme="static"), SKIPPED),
    "fp8 with a head": (FP8, nothing, ()),
}
REFUSED: dict[str, tuple[Method, Change, tuple[str, ...], str]] = {
    "gptq ordered without g_idx": (
        others.gptq(4, 32, order=True),
        lacks("g_idx"),
        SKIPPED,
        r"down_proj.qweight' lacks its part '.*down_proj.g_idx'; fetch the model again",
    ),
    "gptq group sizes": (GPTQ, says(groupsize=64), SKIPPED, "group_size=32 contradicts another of .*: keep one"),
    "gptq marlin": (GPTQ, says(checkpoint_format="marlin"), SKIPPED, "checkpoint_format='marlin' is not supported"),
    "gptq with an adapter": (GPTQ, says(adapter={"name": "lora"}), SKIPPED, "adapter=.* is unknown and may change"),
    "gptq with biases": (GPTQ, give_biases(1), SKIPPED, "down_proj.bias' has no place in the model"),
    "gptq of two formats": (
        GPTQ,
        says(format="gptq_v2"),
        SKIPPED,
        "format='gptq_v2' contradicts checkpoint_format='gptq': keep the one that its writer meant",
    ),
    "awq without zeros": (
        AWQ,
        both(says(zero_point=False), lacks("qzeros")),
        SKIPPED,
        "down_proj.qweight' lacks its part '.*down_proj.qzeros'; fetch the model again",
    ),
    "ordered without weight_g_idx": (
        writers.pack_quantized(4, 32, order=True),
        lacks("weight_g_idx"),
        SKIPPED,
        r"weight_packed' lacks its part '.*weight_g_idx'; fetch the model again",
    ),
    "a group's format": (
        PACK,
        group_format("marlin-24"),
        SKIPPED,
        "group_0.format='marlin-24' is one GPU kernel's order of weights",
    ),
    "an unknown order": (PACK, weights_say(actorder="columns"), SKIPPED, "weights.actorder='columns' is not supported"),
    "a preset's name": (
        PACK,
        says(config_groups={"W4A16": ["Linear"]}),
        SKIPPED,
        "config quantization_config.config_groups.W4A16 must be a JSON object",
    ),
    "weights not compressed yet": (PACK, freeze, DENSE, "up_proj.weight_scale' is a part of a quantized matrix"),
    "unstructured zeros": (
        SPARSE,
        lambda t, c, m: c["quantization_config"]["sparsity_config"].update(format="sparse-bitmask"),
        SKIPPED,
        "sparsity_config.format='sparse-bitmask' is not supported",
    ),
    "mlx": (GPTQ, store_as_mlx, SKIPPED, "its weights are in MLX's own format, which is not read: take the model"),
    "auto-round": (GPTQ, says(quant_method="auto-round"), SKIPPED, "quant_method='auto-round' is unknown"),
    "modelopt": (STATIC, says(quant_method="modelopt"), SKIPPED, "quant_method='modelopt' is unknown"),
    "a scale that is no number": (GPTQ, spoil("scales", np.nan), SKIPPED, "up_proj.scales' holds scales that"),
    "an infinite scale": (PACK, spoil("weight_scale", np.inf), SKIPPED, "up_proj.weight_scale' holds scales that are"),
    "nvfp4 scales over nothing": (
        others.nvfp4(),
        lambda t, c, m: t.update({"model.layers.0.mlp.up_proj.weight_global_scale": torch.zeros(1)}),
        SKIPPED,
        "up_proj.weight_global_scale' is 0, and scales are divided by it; fetch the model again",
    ),
    "an fp8 scale that is no number": (
        others.fp8("row"),
        spoil("weight_scale", np.nan),
        SKIPPED,
        "up_proj.weight_scale' holds scales that are infinite or no number; fetch the model again",
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make("LlamaForCausalLM", LIKE | {"num_hidden_layers": 1}), tmp_path_factory.mktemp("plain"))


def write(source: Path, folder: Path, method: Method, change: Change, skipped: tuple[str, ...]) -> dict[str, Array]:
    """Write a folder and what its matrices mean."""
    meant = writers.quantize_folder(source, folder, method, skipped)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config, meant)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def check(folder: Path, meant: dict[str, Array]) -> torch.Tensor:
    """Compare the values; return the logits of the packed model, or of the widened one where codes are rounded."""
    checkpoint = open_checkpoint(folder)
    for name, values in meant.items():
        assert np.array_equal(checkpoint.tensor(name).float().numpy(), values), name
    packed = all(checkpoint.is_packed(name) for name in meant)
    dtype = None if packed and meant else torch.float32
    return compute(load_model(checkpoint, spec_from_config(checkpoint.config), dtype=dtype, rounded=False))


def compute(model: Any) -> torch.Tensor:
    return torch.cat(
        [torch.stack(row.logits) for row in Paged(model).run([[1, 2, 3], list(range(40, 59))], 3, chunk=16)]
    )


def compute_plain(source: Path, folder: Path, meant: dict[str, Array]) -> torch.Tensor:
    """Return the logits of a plain folder with these values."""
    tensors = load_file(source / "model.safetensors")
    folder.mkdir()
    save_file(
        tensors | {name: torch.from_numpy(value.copy()) for name, value in meant.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text((source / "config.json").read_text())
    checkpoint = open_checkpoint(folder)
    return compute(load_model(checkpoint, spec_from_config(checkpoint.config), dtype=torch.float32))


def check_both(source: Path, folder: Path, meant: dict[str, Array]) -> None:
    found, expected = check(folder, meant), compute_plain(source, folder / "plain", meant)
    assert expected.std() > 0.1 and (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", READ)
def test_it_is_read_as_it_is_meant(name: str, plain: Path, tmp_path: Path) -> None:
    method, change, skipped = READ[name]
    meant = write(plain, tmp_path, method, change, skipped)
    assert len(meant) == {SKIPPED: 7, (): 8, DENSE: 0, ("lm_head", "gate_proj"): 6}[skipped]
    check_both(plain, tmp_path, meant)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(name: str, plain: Path, tmp_path: Path) -> None:
    method, change, skipped, reason = REFUSED[name]
    write(plain, tmp_path, method, change, skipped)
    with pytest.raises(InvalidModel, match=reason) as caught:
        checkpoint = open_checkpoint(tmp_path)
        load_model(checkpoint, spec_from_config(checkpoint.config), dtype=None)
    message = str(caught.value)
    assert message.startswith(str(tmp_path)) and "\n" not in message and len(message) < 500


@pytest.mark.parametrize(("inside", "beside"), [(True, False), (False, True), (True, True)])
def test_settings_of_a_text_model(inside: bool, beside: bool, tmp_path: Path) -> None:
    """Where a multimodal config has them: in text_config, or beside it."""
    like = {**FAMILIES["Gemma3ForCausalLM"].like[0], "hidden_size": 64, "intermediate_size": 64}
    source = save(make("Gemma3ForCausalLM", like), tmp_path / "plain")

    def wrap(tensors: Tensors, config: dict[str, Any], meant: dict[str, Array]) -> None:
        settings, text = config.pop("quantization_config"), {**config, "model_type": "gemma3_text"}
        del text["architectures"]
        config.clear()
        config |= {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
        text |= {"quantization_config": settings} if inside else {}
        config |= {"quantization_config": settings} if beside else {}
        for found in (tensors, meant):
            for name in list(found):
                found[f"language_model.{name}"] = found.pop(name)  # type: ignore[assignment]

    meant = write(source, tmp_path / "made", PACK, wrap, SKIPPED)
    check(tmp_path / "made", meant)
    if inside and beside:
        config = json.loads((tmp_path / "made" / "config.json").read_text())
        config["quantization_config"]["ignore"] = []
        (tmp_path / "made" / "config.json").write_text(json.dumps(config))
        with pytest.raises(InvalidModel, match="quantization_config and text_config.quantization_config differ: keep"):
            open_checkpoint(tmp_path / "made")


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8", "fp8 48", "pack", "nf4"])
def test_joint_matrices(name: str, tmp_path: Path) -> None:
    """qkv_proj and gate_up_proj, whose parts may begin within a block."""
    methods = {"gptq": others.gptq(4, 32, order=True), "awq": AWQ, "fp8": FP8, "fp8 48": others.fp8("block", 48)}
    methods |= {"pack": writers.pack_quantized(4, 32, symmetric=False), "nf4": BNB}
    source = save(make("Phi3ForCausalLM", LIKE | {"num_hidden_layers": 1, "pad_token_id": 0}), tmp_path / "plain")
    check_both(source, tmp_path / "made", write(source, tmp_path / "made", methods[name], nothing, SKIPPED))
