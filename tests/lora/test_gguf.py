"""GGUF adapters of llama.cpp: the same matrices as those of the PEFT folders that they are made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from penstock import LLM, LoRARequest, SamplingParams
from penstock.cli import main
from penstock.errors import InvalidModel
from penstock.models.lora import Adapter, fingerprint, read_adapter
from penstock.models.spec import spec_from_config
from tests.files import convert
from tests.lora import adapters
from tests.models import oracle

ALPHA = 6
KINDS = {"f32": convert.F32, "f16": convert.F16, "q8_0": gguf.GGMLQuantizationType.Q8_0}


def write(
    path: Path,
    model: Any,
    pairs: adapters.Pairs,
    architecture: str,
    kind: str = "f32",
    alpha: float = ALPHA,
    keys: dict[str, str] | None = None,
) -> Path:
    """Write an adapter as llama.cpp's convert_lora_to_gguf.py does."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"general.type": "adapter", "adapter.type": "lora", **(keys or {})}.items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], model.config.num_hidden_layers)
    tensors = {}
    for module, (a, b) in pairs.items():
        name = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        assert name, module
        tensors[f"{name}.lora_a"] = a.T if name == "token_embd.weight" else a
        tensors[f"{name}.lora_b"] = convert._changed(f"{module}.weight", b, model.config, architecture)
    convert.write_tensors(writer, tensors, lambda name: KINDS[kind])
    return path


def make(name: str, folder: Path) -> tuple[str, Any, Any, adapters.Pairs]:
    architecture = convert.MODELS[name][0]
    model = convert.tiny_model(name)
    spec = spec_from_config({**model.config.to_dict(), "architectures": [type(model).__name__]})
    pairs = adapters.make_pairs(model, 4, 3)
    if model.config.tie_word_embeddings:
        pairs.pop("lm_head", None)
    return architecture, model, spec, pairs


def assert_equal(found: Adapter, wanted: Adapter, limit: float = 0.0) -> None:
    assert found.parts.keys() == wanted.parts.keys() and found.rank == wanted.rank
    for name, parts in found.parts.items():
        for one, other in zip(*(sorted(each, key=lambda part: part.first) for each in (parts, wanted.parts[name]))):
            assert (one.rank, one.first, one.num_out, one.scale) == (
                other.rank,
                other.first,
                other.num_out,
                other.scale,
            )
            for ours, theirs in ((one.a, other.a), (one.b, other.b)):
                assert ours.shape == theirs.shape
                assert (ours.float() - theirs.float()).abs().max() <= limit * theirs.float().abs().max()


@pytest.mark.parametrize("name", ["llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gptneox"])
def test_equals_the_folder(name: str, tmp_path: Path) -> None:
    architecture, model, spec, pairs = make(name, tmp_path)
    wanted = read_adapter(adapters.write(tmp_path / "peft", model, pairs, ALPHA), spec, 16)
    assert_equal(read_adapter(write(tmp_path / "a.gguf", model, pairs, architecture), spec, 16), wanted)
    for kind, limit in (("f16", 1e-3), ("q8_0", 0.02)):
        path = write(tmp_path / f"{kind}.gguf", model, pairs, architecture, kind)
        assert_equal(read_adapter(path, spec, 16), wanted, limit)
        assert fingerprint(path)


def test_ranks_may_differ_and_no_alpha_is_a_factor_of_one(tmp_path: Path) -> None:
    architecture, model, spec, pairs = make("qwen2", tmp_path)
    first = next(iter(pairs))
    pairs[first] = (pairs[first][0][:2].contiguous(), pairs[first][1][:, :2].contiguous())

    def scales(alpha: float) -> set[tuple[int, float]]:
        path = write(tmp_path / f"{alpha}.gguf", model, pairs, architecture, alpha=alpha)
        return {(part.rank, part.scale) for parts in read_adapter(path, spec, 16).parts.values() for part in parts}

    assert scales(ALPHA) == {(2, 3.0), (4, 1.5)} and scales(0) == {(2, 1.0), (4, 1.0)}


def test_runs_and_merges_like_the_folder(tmp_path: Path) -> None:
    """Over a GGUF model and over the folder that it was made from; one file and one folder in a batch."""
    architecture, model, _, pairs = make("llama", tmp_path)
    folder = adapters.write(tmp_path / "peft", model, pairs, ALPHA)
    path = write(tmp_path / "a.gguf", model, pairs, architecture)
    base = oracle.save(model, tmp_path / "base")
    convert.write_gguf(model, architecture, tmp_path / "base.gguf")
    loras = [None, LoRARequest("peft", 1, str(folder)), LoRARequest("gguf", 2, str(path))]
    for each in (str(base), str(tmp_path / "base.gguf")):
        with LLM(
            each, dtype="float32", enable_lora=True, skip_tokenizer_init=True, progress=False, device="cpu",
            max_model_len=64,
        ) as llm:  # fmt: skip
            params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
            plain, one, other = llm.generate([[3, 5, 7, 11]] * 3, params, lora_request=loras, use_tqdm=False)
        assert one.outputs[0].logprobs == other.outputs[0].logprobs != plain.outputs[0].logprobs
    for number, lora in enumerate((folder, path)):
        assert main(["merge", str(base), str(lora), str(tmp_path / f"{number}")]) == 0
    merged = [load_file(tmp_path / f"{number}" / "model.safetensors") for number in range(2)]
    assert all(merged[0][name].equal(merged[1][name]) for name in merged[0])


def test_bad_files_say_why(tmp_path: Path) -> None:
    architecture, model, spec, pairs = make("llama", tmp_path)

    def refuse(said: str, path: Path, max_rank: int = 16) -> None:
        with pytest.raises(InvalidModel, match=said) as raised:
            read_adapter(path, spec, max_rank)
        assert "\n" not in str(raised.value)

    good = write(tmp_path / "good.gguf", model, pairs, architecture)
    refuse("rank 4 is over max_lora_rank=2", good, 2)
    refuse("is no file", tmp_path / "none.gguf")
    refuse(
        "'model'.*another kind of file",
        write(tmp_path / "b.gguf", model, pairs, "llama", keys={"general.type": "model"}),
    )
    refuse("adapter.type is 'aura'", write(tmp_path / "c.gguf", model, pairs, "llama", keys={"adapter.type": "aura"}))
    refuse("general.architecture='qwen2'.*another model", write(tmp_path / "d.gguf", model, pairs, "qwen2"))
    name = "model.layers.0.self_attn.q_proj"
    a, b = pairs[name]
    wide = {name: (torch.ones(4, 2 * a.shape[1]), b)}
    refuse(r"attn_q.weight.lora_a.*\[4, 128\].*take \[4, 64\]", write(tmp_path / "e.gguf", model, wide, architecture))
    hurt = {name: (a * float("nan"), b)}
    refuse("NaN or infinity", write(tmp_path / "f.gguf", model, hurt, architecture))
    data = good.read_bytes()
    good.write_bytes(data[: len(data) // 2])
    refuse("good.gguf", good)
