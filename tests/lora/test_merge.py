"""`penstock merge`: the files it writes, read by transformers, are the base with the adapters' products added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams
from penstock.cli import main
from penstock.models.files.safetensors import INDEX
from penstock.models.spec import FAMILIES
from tests.lora import adapters
from tests.models import oracle

FAMILIES_MERGED = ("LlamaForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM")
PROMPT = [3, 5, 7, 11, 13, 2, 9]
ALPHA = 8


def make(architecture: str, folder: Path, **config: Any) -> tuple[Any, str]:
    model = oracle.make(architecture, {**FAMILIES[architecture].like[0], **config})
    return model, str(oracle.save(model, folder / "base"))


@pytest.mark.parametrize("architecture", FAMILIES_MERGED)
def test_merged_files_are_what_the_adapters_compute(architecture: str, tmp_path: Path) -> None:
    theirs, base = make(architecture, tmp_path)
    pairs = [adapters.make_pairs(theirs, rank, rank) for rank in (4, 9)]
    folders = [str(adapters.write(tmp_path / f"{i}", theirs, each, ALPHA)) for i, each in enumerate(pairs)]
    out = tmp_path / "out"
    assert main(["merge", base, *folders, str(out), "--scale", "1", "--scale", "-0.5"]) == 0
    expected = adapters.merge(theirs, pairs[0], adapters.scale_of(ALPHA, 4))
    expected = adapters.merge(expected, pairs[1], -0.5 * adapters.scale_of(ALPHA, 9))
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    wanted = oracle.logits(expected, PROMPT)
    assert (oracle.logits(merged, PROMPT) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    with LLM(str(out), dtype="float32", skip_tokenizer_init=True, device="cpu", progress=False) as llm:
        tokens = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    assert tokens[0].outputs[0].token_ids[0] == wanted[-1].argmax()


def test_shards_and_what_is_not_adapted_stay(tmp_path: Path) -> None:
    theirs, base = make("LlamaForCausalLM", tmp_path, tie_word_embeddings=False)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(f"{base}/model.safetensors").items()}
    Path(base, "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in parts.items():
        save_file({name: tensors[name] for name in part}, Path(base, shard))
    index = {"metadata": {}, "weight_map": {name: shard for shard, part in parts.items() for name in part}}
    Path(base, INDEX).write_text(json.dumps(index))
    pairs = adapters.make_pairs(theirs, 4, 1, ("q_proj",))
    folder = adapters.write(tmp_path / "lora", theirs, pairs, ALPHA)
    out = tmp_path / "out"
    out.mkdir()
    assert main(["merge", base, str(folder), str(out)]) == 0
    for shard, part in parts.items():
        with safe_open(out / shard, "pt") as file:
            assert sorted(file.keys()) == part
            for name in part:
                assert file.get_tensor(name).dtype is torch.bfloat16
                assert file.get_tensor(name).equal(tensors[name]) == ("q_proj" not in name)
    assert json.loads((out / INDEX).read_text())["weight_map"] == index["weight_map"]
    assert not list(tmp_path.glob(".out*"))


def test_bad_merges_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, base = make("LlamaForCausalLM", tmp_path)
    folder = str(adapters.write(tmp_path / "lora", theirs, adapters.make_pairs(theirs, 4, 1), ALPHA))
    config = json.loads(Path(base, "config.json").read_text())

    def refuse(*arguments: str, said: str) -> None:
        assert main(["merge", *arguments]) == 1
        assert said in " ".join(capsys.readouterr().err.split())

    refuse(base, str(tmp_path / "out"), said="no other folder")
    refuse(base, folder, base, said="exists")
    refuse(base, folder, str(tmp_path / "out"), "--scale", "1", "--scale", "2", said="2 scales")
    refuse(base, folder, str(tmp_path / "out"), "--scale", "1e38", said="scale")
    refuse(base, base, str(tmp_path / "out"), said="adapter_config.json")
    Path(base, "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    refuse(base, folder, str(tmp_path / "out"), said="quantized (gptq): merge into the model it was made from")
    assert not (tmp_path / "out").exists()
