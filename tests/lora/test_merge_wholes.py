"""`penstock merge` of what is no low-rank product: DoRA, biases, whole modules, trained tokens, experts, latents."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.cli import main
from penstock.models.spec import FAMILIES
from tests.lora import adapters
from tests.models import oracle

ALPHA = 8
PROMPT = [3, 5, 7, 11, 13, 2, 9]
ROOT = "base_model.model."
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


def make(architecture: str, folder: Path, **config: Any) -> tuple[Any, Path]:
    model = oracle.make(architecture, {**FAMILIES[architecture].like[0], **config})
    return model, oracle.save(model, folder / "base")


def add(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Add tensors to an adapter."""
    path = folder / "adapter_model.safetensors"
    save_file({**load_file(path), **tensors}, path)
    return folder


def merge(base: Path, *rest: str | Path) -> dict[str, Tensor]:
    *folders, out = map(str, rest)
    assert main(["merge", str(base), *folders, out]) == 0
    return load_file(Path(out, "model.safetensors"))


def refuse(capsys: pytest.CaptureFixture[str], base: Path, folder: Path, said: str) -> None:
    assert main(["merge", str(base), str(folder), str(folder.parent / "none")]) == 1
    assert said in " ".join(capsys.readouterr().err.split())


def test_dora_scales_each_output_to_its_magnitude(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, base = make("LlamaForCausalLM", tmp_path)
    pairs = adapters.make_pairs(theirs, 4, 1, ("q_proj",))
    folder = adapters.write(tmp_path / "lora", theirs, pairs, ALPHA, use_dora=True)
    sizes = {name: torch.rand(b.shape[0]) + 0.5 for name, (_, b) in pairs.items()}
    refuse(capsys, base, folder, "not each module has a magnitude")
    add(folder, {f"{ROOT}{name}.lora_magnitude_vector": size for name, size in sizes.items()})
    before, after = load_file(base / "model.safetensors"), merge(base, folder, tmp_path / "out")
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        if module not in pairs:
            assert after[name].equal(weight)
            continue
        a, b = pairs[module]
        moved = weight + ALPHA / 4 * (b @ a)
        wanted = sizes[module][:, None] * moved / moved.norm(dim=1, keepdim=True)
        torch.testing.assert_close(after[name], wanted)
        torch.testing.assert_close(after[name].norm(dim=1), sizes[module])
    name = next(iter(sizes))
    add(folder, {f"{ROOT}{name}.lora_magnitude_vector": torch.ones(3)})
    refuse(capsys, base, folder, "magnitude")


def test_whole_modules_biases_and_tokens_replace_the_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, base = make("Qwen2ForCausalLM", tmp_path, tie_word_embeddings=True)
    before = load_file(base / "model.safetensors")
    pairs = adapters.make_pairs(theirs, 4, 1, ("v_proj",))
    whole = dict(modules_to_save=["norm", "lm_head"], bias="lora_only", trainable_token_indices=[3, 7])
    folder = adapters.write(tmp_path / "lora", theirs, pairs, ALPHA, **whole)
    bias = "model.layers.0.self_attn.v_proj.bias"
    width, tokens = before["model.norm.weight"].shape[0], torch.randn(2, before["model.norm.weight"].shape[0])
    head = torch.randn(before["model.embed_tokens.weight"].shape)
    add(
        folder,
        {
            f"{ROOT}model.norm.weight": torch.full((width,), 2.0),
            f"{ROOT}lm_head.modules_to_save.default.weight": head,
            f"{ROOT}{bias.replace('.bias', '.base_layer.bias')}": torch.full_like(before[bias], 3.0),
            f"{ROOT}model.embed_tokens.token_adapter.trainable_tokens_delta": tokens,
        },
    )
    after = merge(base, folder, tmp_path / "out")
    assert (after["model.norm.weight"] == 2).all() and (after[bias] == 3).all() and after["lm_head.weight"].equal(head)
    embedding = before["model.embed_tokens.weight"].clone()
    embedding[[3, 7]] = tokens
    torch.testing.assert_close(after["model.embed_tokens.weight"], embedding, rtol=0, atol=1e-6)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    half = merge_at(base, folder, tmp_path / "half", 0.5)
    torch.testing.assert_close(half["model.norm.weight"], (before["model.norm.weight"] + 2) / 2)
    add(folder, {f"{ROOT}model.norm.weight": torch.ones(3)})
    refuse(capsys, base, folder, "has shape [3], and this model takes")
    add(folder, {f"{ROOT}model.norm.weight": torch.ones(width), f"{ROOT}model.strange.weight": torch.ones(3)})
    refuse(capsys, base, folder, "model.strange.weight")
    far = adapters.write(tmp_path / "far", theirs, pairs, ALPHA, trainable_token_indices=[10**6])
    add(far, {f"{ROOT}model.embed_tokens.token_adapter.trainable_tokens_delta": tokens[:1]})
    refuse(capsys, base, far, "token 1000000")


def merge_at(base: Path, folder: Path, out: Path, scale: float) -> dict[str, Tensor]:
    assert main(["merge", str(base), str(folder), str(out), "--scale", str(scale)]) == 0
    return load_file(out / "model.safetensors")


def write_pairs(folder: Path, pairs: dict[str, tuple[Tensor, Tensor]]) -> Path:
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in pairs.items():
        tensors |= {f"{ROOT}{name}.lora_A.weight": a, f"{ROOT}{name}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in pairs})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("architecture", "end"), [("OlmoeForCausalLM", "up_proj"), ("YoutuForCausalLM", "kv_b_proj")])
def test_experts_and_latents_are_merged_by_the_names_of_the_file(architecture: str, end: str, tmp_path: Path) -> None:
    _, base = make(architecture, tmp_path)
    before = load_file(base / "model.safetensors")
    names = [name for name in before if name.endswith(f"{end}.weight")]
    assert len(names) > 1
    pairs = {
        name.removesuffix(".weight"): (torch.randn(2, before[name].shape[1]), torch.randn(before[name].shape[0], 2))
        for name in names
    }
    after = merge(base, write_pairs(tmp_path / "lora", pairs), tmp_path / "out")
    for name, weight in before.items():
        a, b = pairs.get(name.removesuffix(".weight"), (torch.zeros(1, 1), torch.zeros(1, 1)))
        torch.testing.assert_close(after[name], weight + 3 * (b @ a) if name in names else weight)


@needs_peft
@pytest.mark.parametrize(
    "config",
    [
        dict(target_modules=["q_proj", "down_proj"], use_dora=True),
        dict(target_modules=["q_proj", "v_proj"], bias="all"),
        dict(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
        dict(target_modules=["o_proj"], trainable_token_indices=[2, 9]),
        dict(target_modules=["q_proj", "embed_tokens", "lm_head"], use_rslora=True, rank_pattern={"q_proj": 5}),
        dict(target_modules="all-linear", exclude_modules=["k_proj"], alpha_pattern={"v_proj": 3}),
        dict(target_modules=["q_proj"], layers_to_transform=[1]),
    ],
    ids=["dora", "bias", "wholes", "tokens", "outer", "patterns", "layers"],
)
@pytest.mark.filterwarnings("ignore")
def test_equals_peft(config: dict[str, Any], tmp_path: Path) -> None:
    import peft

    theirs, base = make("Qwen2ForCausalLM", tmp_path, tie_word_embeddings=False)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=ALPHA, task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad or (config.get("bias") and name.endswith("bias")):
                parameter.add_(0.2 * torch.randn(parameter.shape))
    adapted.save_pretrained(str(tmp_path / "lora"))
    wanted = oracle.logits(adapted.eval(), PROMPT)
    merge(base, tmp_path / "lora", tmp_path / "out")
    merged = type(theirs).from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (oracle.logits(merged, PROMPT) - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    plain = oracle.logits(type(theirs).from_pretrained(base, dtype=torch.float32), PROMPT)
    assert (plain - wanted).abs().max() > 0.01 * wanted.abs().max()
