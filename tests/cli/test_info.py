from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.cli import main
from penstock.models.spec import FAMILIES, spec_from_config
from tests.models import oracle


def test_info_of_a_folder_counts_what_the_checkpoint_holds(
    chat_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(chat_model).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    width, inner, kv = config["hidden_size"], config["intermediate_size"], 16
    tensors = {"model.embed_tokens.weight": torch.zeros(256, width), "model.norm.weight": torch.ones(width)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        tensors |= {f"{prefix}{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert main(["info", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert facts["num_parameters"] == spec_from_config(config).num_parameters
    assert facts["num_bytes"] == (folder / "model.safetensors").stat().st_size
    expected = {
        "format": "safetensors",
        "family": "LlamaForCausalLM",
        "layers": 2,
        "width": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 8,
        "context": 16384,
        "vocabulary": 256,
        "quantization": "bfloat16",
        "tokenizer": "BPE",
        "chat_template": True,
    }
    assert {name: facts[name] for name in expected} == expected
    assert main(["info", str(folder)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if not line.startswith("chat"))
    assert lines["parameters"] == "26.78 k" and lines["quantization"] == "bfloat16"


@pytest.mark.parametrize(("architecture", "kv_heads"), [("MixtralForCausalLM", 2), ("Mamba2ForCausalLM", 0)])
def test_info_of_experts_and_recurrences(
    architecture: str, kv_heads: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = oracle.make(architecture, FAMILIES[architecture].like[0])
    assert main(["info", str(oracle.save(model, tmp_path)), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert (facts["family"], facts["kv_heads"], facts["head_size"]) == (architecture, kv_heads, 16)


def test_info_shows_what_each_rank_will_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(oracle.save(oracle.make("LlamaForCausalLM", FAMILIES["LlamaForCausalLM"].like[0]), tmp_path / "model"))
    sizes = ["-tp", "2", "-pp", "2"]
    assert main(["info", model, *sizes, "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [(one["stage"], one["shard"], one["first_layer"], one["last_layer"]) for one in ranks] == [
        (1, 0, 1, 1),
        (1, 1, 1, 1),
        (0, 0, 0, 0),
        (0, 1, 0, 0),
    ]
    assert main(["info", model, "-pp", "2", "--json"]) == 0
    halves = json.loads(capsys.readouterr().out)["ranks"]
    assert 0.5 < ranks[0]["weight_bytes"] / halves[0]["weight_bytes"] < 0.6  # norms are on both
    assert ranks[0]["cache_bytes_per_token"] * 2 == halves[0]["cache_bytes_per_token"]
    assert main(["info", model, *sizes]) == 0
    assert "stage 0 (layers 0 to 0), share 1" in capsys.readouterr().out
    assert main(["info", model, "-pp", "3"]) == 1
    assert "pipeline_parallel_size=3 is over the model's 2 layers" in capsys.readouterr().err


def test_info_shows_what_stays_in_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(oracle.save(oracle.make("LlamaForCausalLM", FAMILIES["LlamaForCausalLM"].like[0]), tmp_path / "model"))
    assert main(["info", model, "--json"]) == 0
    assert "host_weight_bytes" not in json.loads(capsys.readouterr().out)
    size = 10_000
    assert main(["info", model, "--cpu-offload-gb", str(size / 2**30), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["host_weight_bytes"] == size and facts["gpu_buffer_bytes"] > 0
    assert facts["gpu_weight_bytes"] + size == 2 * facts["num_parameters"]
    assert main(["info", model, "--cpu-offload-gb", "1"]) == 0
    told = capsys.readouterr().out
    assert "weights in host memory" in told and "buffers beside them" in told
