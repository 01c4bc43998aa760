"""Models made of a tiny one: what is written, read back by us and by the formats' own definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.errors import InvalidConfig, InvalidModel
from penstock.models.files import open_checkpoint
from penstock.models.spec import FAMILIES
from penstock.quantize.gguf.mixes import MIXES, Model, choose_type
from penstock.quantize.run import Made, quantize
from penstock.quantize.targets import make_target
from penstock.quantize.walk import LayerStack, Walk
from tests.files.convert import MODELS
from tests.models import oracle
from tests.models.test_multimodal import TINY
from tests.quantize.conftest import TEXT, write_folder

Q = "model.layers.1.self_attn.q_proj"


def make(
    source: Path, out: Path, tokens: list[int] | None, scheme: str, method: str | None = None, **more: object
) -> Made:
    group = more.pop("group_size", None)
    target = make_target(scheme, method, group, **more)  # type: ignore[arg-type]
    checkpoint = open_checkpoint(source)
    try:
        return quantize(checkpoint, out, target, tokens, group_size=group, sample=TEXT)  # type: ignore[arg-type]
    finally:
        checkpoint.close()


def hidden(path: Path, tokens: list[int]) -> torch.Tensor:
    """The last layer's outputs, with the weights as the file means them."""
    checkpoint = open_checkpoint(path)
    stack, walk = LayerStack(checkpoint, 128), Walk([tokens[:100], tokens[100:160]])
    with torch.inference_mode():
        x = walk.embed(stack.ends()[0])
        for index in range(stack.spec.num_layers):
            x = walk.run(stack.block(index, stack.params(index)), stack.memory(index), x)
    checkpoint.close()
    return x


def unpack(words: np.ndarray, bits: int, width: int) -> np.ndarray:
    """The definition of pack-quantized: codes from the lowest bits up, offset by half their range."""
    fields = words.view(np.uint32)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & np.uint32((1 << bits) - 1)
    return fields.reshape(len(words), -1)[:, :width].astype(np.int64) - (1 << bits - 1)


def widen(parts: dict[str, torch.Tensor], name: str, bits: int) -> np.ndarray:
    scale = parts[f"{name}.weight_scale"].float().numpy()
    if f"{name}.weight_packed" in parts:
        rows, width = parts[f"{name}.weight_shape"].tolist()
        codes = unpack(parts[f"{name}.weight_packed"].numpy(), bits, width)
        assert codes.shape == (rows, width)
    else:
        codes = parts[f"{name}.weight"].float().numpy()
    zero = np.zeros_like(scale)
    if f"{name}.weight_zero_point" in parts:
        zero = unpack(parts[f"{name}.weight_zero_point"].numpy().T.copy(), bits, len(codes)).T
    each = codes.shape[1] // scale.shape[1]
    return np.repeat(scale, each, axis=1) * (codes - np.repeat(zero, each, axis=1))


@pytest.mark.parametrize(
    "scheme, method, bits",
    [
        ("int4", "rtn", 4), ("int4", "gptq", 4), ("int4", "awq", 4), ("int4", "hqq", 4), ("int8", "rtn", 8),
        ("w8a8", "smoothquant", 8), ("fp8", "rtn", 8),
    ],
)  # fmt: skip
def test_folders_hold_what_their_format_means(
    folder: Path, tokens: list[int], tmp_path: Path, scheme: str, method: str, bits: int
) -> None:
    out = tmp_path / "out"
    made = make(folder, out, tokens, scheme, method)
    assert not (tmp_path / "out.unfinished").exists()
    assert made.errors and all(0 < error < 0.5 for error in made.errors.values())
    parts = load_file(out / "model.safetensors")
    checkpoint = open_checkpoint(out)
    for name in (Q, "model.layers.0.mlp.down_proj"):
        ours = checkpoint.tensor(f"{name}.weight").float().numpy()
        assert np.array_equal(ours, widen(parts, name, bits).astype(np.float32))
    checkpoint.close()
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "compressed-tensors" and described["ignore"] == ["lm_head"]
    change = hidden(out, tokens) - hidden(folder, tokens)
    assert 0 < change.norm() / hidden(folder, tokens).norm() < 0.6


@pytest.mark.parametrize("mix", ["Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "F16"])
def test_gguf_files_hold_the_model(folder: Path, tokens: list[int], tmp_path: Path, mix: str) -> None:
    out = tmp_path / "out.gguf"
    make(folder, out, tokens, f"gguf:{mix}")
    reader = gguf.GGUFReader(out)
    checkpoint = open_checkpoint(out)
    assert checkpoint.quantization == mix
    stored = {tensor.name: tensor for tensor in reader.tensors}
    up = stored["blk.1.ffn_up.weight"]
    theirs = gguf.quants.dequantize(up.data, up.tensor_type)
    assert np.array_equal(theirs, checkpoint.tensor("model.layers.1.mlp.up_proj.weight").float().numpy())
    limit = {"F16": 1e-3, "Q8_0": 0.05, "Q6_K": 0.05}.get(mix, 0.6)
    original = hidden(folder, tokens)
    assert (hidden(out, tokens) - original).norm() / original.norm() < limit  # q and k rows are in place too
    checkpoint.close()


def test_a_gguf_source_keeps_its_metadata(folder: Path, tokens: list[int], tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    make(folder, first, None, "gguf:F32")
    make(first, second, tokens, "gguf:Q5_1", "awq")
    before, after = (gguf.GGUFReader(path).fields for path in (first, second))
    assert set(before) == set(after)
    for name in set(before) - {"general.file_type", "GGUF.tensor_count", "GGUF.kv_count"}:
        assert before[name].types == after[name].types and before[name].contents() == after[name].contents(), name
    original = hidden(folder, tokens)
    assert (hidden(second, tokens) - original).norm() / original.norm() < 0.3


def test_a_gguf_source_becomes_a_folder(folder: Path, tokens: list[int], tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second"
    make(folder, first, None, "gguf:F32")
    make(first, second, tokens, "bf16")
    assert torch.equal(hidden(second, tokens), hidden(folder, tokens))
    from penstock.text.tokenizers.tokenizer import Tokenizer

    one, other = Tokenizer.from_folder(folder), Tokenizer.from_folder(second)
    assert one.encode(TEXT + " éß 12") == other.encode(TEXT + " éß 12")
    assert other.chat_template == one.chat_template


UNSAID = ("llama-factors", "qwen2vl", "qwen3vl")  # the keys cannot say their configs, or are media's


@pytest.mark.parametrize("name", [name for name in MODELS if name not in UNSAID])
def test_gguf_metadata_describes_other_families(name: str, tokens: list[int], tmp_path: Path) -> None:
    source, out = write_folder(tmp_path / "source", name), tmp_path / "out.gguf"
    make(source, out, None, "gguf:F32")
    original = hidden(source, tokens)
    assert (hidden(out, tokens) - original).norm() / original.norm() < 1e-5


def test_families_without_gguf_keys_are_refused_by_name(tmp_path: Path, tokens: list[int]) -> None:
    source = oracle.save(oracle.make("OPTForCausalLM", FAMILIES["OPTForCausalLM"].like[0]), tmp_path / "source")
    with pytest.raises(InvalidModel, match="of other GGUF files and of LlamaForCausalLM.*not of OPTForCausalLM"):
        make(source, tmp_path / "out.gguf", tokens, "gguf:Q8_0")
    source = write_folder(tmp_path / "factors", "llama-factors")
    with pytest.raises(InvalidModel, match="GGUF's keys for llama cannot describe the model's layers"):
        make(source, tmp_path / "out.gguf", tokens, "gguf:Q8_0")


def test_gemma_is_rounded_in_place(tmp_path: Path, tokens: list[int]) -> None:
    source = write_folder(tmp_path / "source", "gemma2")
    make(source, tmp_path / "out", tokens, "int8")
    original = hidden(source, tokens)
    assert (hidden(tmp_path / "out", tokens) - original).norm() / original.norm() < 0.05


@pytest.mark.parametrize("sparsity", ["0.5", "2:4"])
@pytest.mark.parametrize("prune", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("scheme, method", [("bf16", "rtn"), ("int4", "gptq")])
def test_half_of_the_weights_are_zero(
    folder: Path, tokens: list[int], tmp_path: Path, sparsity: str, prune: str, scheme: str, method: str
) -> None:
    make(folder, tmp_path / "out", tokens, scheme, method, sparsity=sparsity, prune=prune)
    checkpoint = open_checkpoint(tmp_path / "out")
    weight = checkpoint.tensor(f"{Q}.weight").float()
    checkpoint.close()
    zeros = weight == 0
    if sparsity == "2:4":
        assert (zeros.view(len(weight), -1, 4).sum(-1) >= 2).all()
    assert zeros.float().mean() >= 0.45
    assert weight.abs().sum() > 0


@pytest.mark.parametrize("scheme, method", [("bf16", "rtn"), ("w8a8", "smoothquant"), ("fp8", "rtn")])
def test_two_of_four_values_are_left_out_of_the_file(
    folder: Path, tokens: list[int], tmp_path: Path, scheme: str, method: str
) -> None:
    """The definition of sparse-24-bitmask: bits from the lowest up, the kept values of a row in turn."""
    out = tmp_path / "out"
    make(folder, out, tokens, scheme, method, sparsity="2:4", prune="wanda")
    parts = load_file(out / "model.safetensors")
    assert f"{Q}.weight" not in parts
    rows, width = parts[f"{Q}.shape"].flatten().tolist()
    kept = parts[f"{Q}.compressed"]
    assert kept.shape == (rows, width // 2)
    mask = np.unpackbits(parts[f"{Q}.bitmask"].numpy(), axis=1, bitorder="little").astype(bool)
    assert (mask.reshape(rows, -1, 4).sum(-1) == 2).all()
    values = np.zeros((rows, width), dtype=np.float32)
    values[mask] = kept.float().numpy().ravel()
    if scheme != "bf16":
        values = values * parts[f"{Q}.weight_scale"].float().numpy()
    checkpoint = open_checkpoint(out)
    assert np.array_equal(checkpoint.tensor(f"{Q}.weight").float().numpy(), values)
    checkpoint.close()
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    assert described["sparsity_config"]["format"] == "sparse-24-bitmask"
    assert "lm_head.weight" in parts and described["sparsity_config"]["ignore"] == ["lm_head"]
    dense = tmp_path / "dense"
    make(folder, dense, tokens, scheme, method, sparsity="0.5", prune="wanda")
    sizes = [(path / "model.safetensors").stat().st_size for path in (out, dense)]
    assert sizes[0] < sizes[1]
    original = hidden(folder, tokens)
    assert (hidden(out, tokens) - original).norm() / original.norm() < 1.2


def test_bad_options_say_what_is_known(folder: Path, tokens: list[int], tmp_path: Path) -> None:
    cases: list[tuple[str, str | None, dict[str, Any], str]] = [
        ("int3", None, {}, "scheme='int3' is unknown; known: int8, int4, w8a8, fp8, bf16, and gguf: followed by"),
        ("gguf:Q9", None, {}, "names no GGUF type; known: F32.*Q4_K_M"),
        ("int4", "magic", {}, "method='magic' is unknown; known: rtn, gptq, awq, smoothquant, hqq"),
        ("gguf:Q4_0", "gptq", {}, "method=gptq does not make scheme=gguf:Q4_0: use rtn or awq; gptq makes int8"),
        ("int4", "rtn", {"sparsity": "3:4"}, "sparsity='3:4' is unknown; known: none, 0.5, 2:4"),
        (
            "int4",
            "rtn",
            {"group_size": 48},
            "group_size=48 does not divide the width 64 and 128.*; 64, 32, 16, 8 would",
        ),
        ("fp8", "rtn", {"group_size": 32}, "group_size=32 has no meaning for scheme=fp8"),
        ("gguf:Q8_0", None, {"sparsity": "0.5"}, "GGUF"),
        ("int4", None, {"prune": "sparsegpt"}, "prune=sparsegpt chooses which weights.*add --sparsity 0.5 or 2:4"),
        (
            "int4",
            "gptq",
            {"prune": "sparsegpt", "sparsity": "0.5", "act_order": True},
            "act_order=True does not go with prune=sparsegpt",
        ),
    ]
    for scheme, method, more, message in cases:
        with pytest.raises(InvalidConfig, match=message):
            make(folder, tmp_path / "out.gguf", tokens, scheme, method, **more)
    with pytest.raises(InvalidConfig, match="the calibration text has 0 tokens, 64 or more are needed"):
        make(folder, tmp_path / "out", [], "int4")
    with pytest.raises(InvalidConfig, match="method=gptq needs a calibration text"):
        make(folder, tmp_path / "out", None, "int4", "gptq")
    with pytest.raises(InvalidModel, match=r"give it a name that ends in \.gguf"):
        make(folder, tmp_path / "out", tokens, "gguf:Q8_0")
    (tmp_path / "there").mkdir()
    with pytest.raises(InvalidConfig, match="there exists: remove it"):
        make(folder, tmp_path / "there", tokens, "int4")
    for place in (Path("."), Path("/")):
        with pytest.raises(InvalidConfig, match=f"^{place} exists: remove it"):
            make(folder, place, tokens, "int4")
    with pytest.raises(InvalidConfig, match="cannot be written.*name an output in a folder"):
        make(folder, tmp_path / "no" / "such" / "out", tokens, "int4")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_transposed_matrices_are_refused_for_folders(tmp_path: Path, tokens: list[int]) -> None:
    source = tmp_path / "source"
    from tests.files.convert import tiny_model

    tiny_model("gpt2").save_pretrained(source)
    with pytest.raises(InvalidModel, match="is stored transposed, which the compressed-tensors format cannot say"):
        make(source, tmp_path / "out", [1] * 100, "int8")


def test_multimodal_models_are_refused(tmp_path: Path) -> None:
    name = "LlavaForConditionalGeneration"
    source = oracle.save(oracle.make(name, TINY[name]), tmp_path / "source")
    for out, scheme in (("out", "int8"), ("out.gguf", "gguf:Q8_0")):
        with pytest.raises(InvalidModel, match=f"{name} is multimodal.* would lack the weights"):
            make(source, tmp_path / out, [1] * 100, scheme)
    assert not list(tmp_path.glob("out*"))


def test_mixes_give_more_bits_to_what_hurts_more() -> None:
    model = Model("llama", 16, 3, has_output=False)
    assert choose_type("Q4_K_M", "token_embd.weight", (100, 2048), model) == "Q6_K"
    assert choose_type("Q4_K_M", "token_embd.weight", (100, 576), model) == "Q8_0"
    assert choose_type("Q4_K_M", "blk.0.attn_v.weight", (64, 2048), model) == "Q6_K"
    assert choose_type("Q4_K_M", "blk.2.attn_v.weight", (64, 2048), model) == "Q4_K"
    assert choose_type("Q4_K_S", "blk.9.ffn_down.weight", (64, 2048), model) == "Q4_K"
    assert choose_type("Q3_K_M", "blk.9.attn_output.weight", (64, 2048), model) == "Q4_K"
    assert choose_type("Q2_K", "blk.9.ffn_up.weight", (64, 2048), model) == "Q2_K"
    assert choose_type("Q4_K", "blk.9.ffn_up.weight", (64, 576), model) == "Q5_0"
    assert choose_type("Q4_0", "blk.9.ffn_up.weight", (64, 36), model) == "F16"
    assert all(choose_type(mix, "blk.0.attn_norm.weight", (64,), model) == "F32" for mix in MIXES)
