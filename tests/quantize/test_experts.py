"""Models with experts or latents: what is made of them loads, and says nearly what the original says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock import LLM, layers
from penstock.models.files import open_checkpoint
from penstock.models.load import load_model
from penstock.models.spec import spec_from_config
from penstock.quant.packed import Packed
from penstock.quantize.compare import Text, compare
from penstock.quantize.walk import LayerStack
from tests.models import oracle
from tests.quantize.conftest import write_tokenizer
from tests.quantize.test_run import make, unpack

WIDE = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
LATENT = WIDE | dict(
    num_key_value_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    num_experts_per_tok=2,
)
YARN = dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, truncate=False, original_max_position_embeddings=32)
MODELS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": WIDE | dict(num_local_experts=4, num_experts_per_tok=2),
    "Qwen2MoeForCausalLM": WIDE
    | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64),
    "Qwen3MoeForCausalLM": WIDE
    | dict(num_experts=16, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16, norm_topk_prob=True),
    "GraniteMoeForCausalLM": WIDE | dict(num_local_experts=4, num_experts_per_tok=2, attention_multiplier=0.25),
    "DeepseekV2ForCausalLM": LATENT
    | dict(q_lora_rank=None, n_routed_experts=4, moe_intermediate_size=32, first_k_dense_replace=1, n_shared_experts=1),
    "DeepseekV3ForCausalLM": LATENT
    | dict(q_lora_rank=32, n_routed_experts=8, moe_intermediate_size=32, first_k_dense_replace=1, n_shared_experts=1)
    | dict(n_group=4, topk_group=2),
    "OlmoeForCausalLM": WIDE | dict(num_experts=4, num_experts_per_tok=2),
    "Glm4MoeForCausalLM": WIDE
    | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1)
    | dict(first_k_dense_replace=1, head_dim=16),
    "Ernie4_5_MoeForCausalLM": WIDE
    | dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=1, moe_layer_start_index=1),
    "Llama4ForCausalLM": WIDE
    | dict(intermediate_size=32, intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=1, head_dim=16)
    | dict(interleave_moe_layer_step=1),
    "GptOssForCausalLM": WIDE
    | dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, rope_parameters=YARN, sliding_window=64),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved on first use."""

    class Folders(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            model = oracle.make(name, MODELS[name], spread=0.08).bfloat16()
            folder = write_tokenizer(oracle.save(model, tmp_path_factory.mktemp(name)))
            return self.setdefault(name, folder)

    return Folders()


def judge(first: Path, second: Path, tokens: list[int]) -> dict[str, float]:
    one, other = open_checkpoint(first), open_checkpoint(second)
    found = compare(one, other, Text([tokens[:128], tokens[128:256]], [1, 1])).summary()
    one.close()
    other.close()
    return found


CASES = [
    ("MixtralForCausalLM", "int4", "rtn"),
    ("MixtralForCausalLM", "int4", "gptq"),
    ("Qwen2MoeForCausalLM", "int8", "rtn"),
    ("Qwen3MoeForCausalLM", "int4", "awq"),
    ("Qwen3MoeForCausalLM", "w8a8", "smoothquant"),
    ("GraniteMoeForCausalLM", "fp8", "rtn"),
    ("DeepseekV2ForCausalLM", "int4", "gptq"),
    ("DeepseekV3ForCausalLM", "int8", "rtn"),
    ("DeepseekV3ForCausalLM", "fp8", "rtn"),
    ("GptOssForCausalLM", "int4", "hqq"),
    ("Llama4ForCausalLM", "int8", "gptq"),
]
LIMITS = {"int4": 0.1, "int8": 0.002, "w8a8": 0.004, "fp8": 0.02}


@pytest.mark.parametrize("name, scheme, method", CASES)
def test_folders_of_experts_say_what_the_original_says(
    folders: dict[str, Path], tokens: list[int], tmp_path: Path, name: str, scheme: str, method: str
) -> None:
    out = tmp_path / "out"
    make(folders[name], out, tokens, scheme, method)
    found = judge(folders[name], out, tokens)
    assert 0 < found["kl_mean"] < LIMITS[scheme]
    assert abs(found["perplexity_ratio"] - 1) < 0.1
    parts = load_file(out / "model.safetensors")
    stored = {key for key in parts if ".experts." in key and "shared" not in key and "bias" not in key}
    suffix = ".weight" if scheme in ("w8a8", "fp8") else ".weight_packed"
    count = sum(key.endswith(suffix) for key in stored)
    experts = (
        MODELS[name].get("num_local_experts") or MODELS[name].get("num_experts") or MODELS[name]["n_routed_experts"]
    )
    layers = 1 if "first_k_dense_replace" in MODELS[name] else 2
    assert count == 3 * experts * layers  # every expert's matrices, one by one
    if name == "Llama4ForCausalLM":
        assert "model.layers.0.feed_forward.experts.3.up_proj.weight_scale" in stored
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    names = [key for key in parts if key.endswith((".gate.weight", ".router.weight", ".router.layer.weight"))]
    routers = [key.removesuffix(".weight") for key in names if ".experts." not in key]
    assert routers and set(routers) <= set(described["ignore"])


FILES = [(name, "F32") for name in MODELS if name != "Llama4ForCausalLM"]
FILES += [("MixtralForCausalLM", "Q4_0"), ("DeepseekV3ForCausalLM", "Q8_0")]


@pytest.mark.parametrize("name, mix", FILES)
def test_gguf_files_of_experts_say_what_the_original_says(
    folders: dict[str, Path], tokens: list[int], tmp_path: Path, name: str, mix: str
) -> None:
    out = tmp_path / "out.gguf"
    make(folders[name], out, tokens, f"gguf:{mix}")
    found = judge(folders[name], out, tokens)
    assert found["kl_mean"] < {"F32": 1e-6, "Q8_0": 0.002, "Q4_0": 0.1}[mix]
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    up = stored["blk.1.ffn_up_exps.weight"]
    theirs = gguf.quants.dequantize(up.data, up.tensor_type)
    checkpoint = open_checkpoint(out)
    assert np.array_equal(theirs, checkpoint.tensor("model.layers.1.mlp.experts.up_exps.weight").float().numpy())
    checkpoint.close()
    assert stored["blk.1.ffn_gate_inp.weight"].tensor_type.name == "F32"


def test_experts_of_a_gguf_file_become_a_folder_and_another_file(
    folders: dict[str, Path], tokens: list[int], tmp_path: Path
) -> None:
    name = "MixtralForCausalLM"
    make(folders[name], tmp_path / "first.gguf", None, "gguf:F32")
    for out, scheme, limit in (("second.gguf", "gguf:Q8_0", 0.002), ("folder", "int8", 0.002), ("wide", "bf16", 1e-6)):
        make(tmp_path / "first.gguf", tmp_path / out, tokens, scheme)
        assert judge(folders[name], tmp_path / out, tokens)["kl_mean"] < limit
    assert "model.layers.1.block_sparse_moe.experts.3.w1.weight" in load_file(tmp_path / "wide" / "model.safetensors")


def test_stacks_come_back_as_they_were(folders: dict[str, Path], tokens: list[int], tmp_path: Path) -> None:
    for name in ("GptOssForCausalLM", "GraniteMoeForCausalLM"):
        make(folders[name], tmp_path / name, tokens, "bf16")
        before, after = (load_file(path / "model.safetensors") for path in (folders[name], tmp_path / name))
        assert set(before) == set(after)
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_an_expert_is_rounded_as_a_matrix_of_its_own(
    folders: dict[str, Path], tokens: list[int], tmp_path: Path
) -> None:
    """int4 codes of an expert are those of its weights alone, and an expert without tokens is rounded too."""
    name, few = "Qwen3MoeForCausalLM", [7] * 70
    make(folders[name], tmp_path / "plain", None, "int4", "rtn")
    made = make(folders[name], tmp_path / "out", few, "int4", "rtn")
    noted = [key for key in made.errors if ".experts." in key]
    assert 0 < len(noted) < 2 * 2 * 16  # one token's experts, in one or two layers
    parts, plain = (load_file(tmp_path / out / "model.safetensors") for out in ("out", "plain"))
    key = "model.layers.0.mlp.experts.5.down_proj.weight_packed"
    assert torch.equal(parts[key], plain[key])
    checkpoint = open_checkpoint(folders[name])
    weight = LayerStack(checkpoint, 64).params(0)["mlp.experts.down.weight"].view(16, 64, 32)[5]
    checkpoint.close()
    scale = (weight.abs().amax(1, keepdim=True) / 7.5).bfloat16().float()
    codes = unpack(parts[key].numpy(), 4, 32)
    assert np.array_equal(codes, (weight / scale).round().clamp(-8, 7).numpy())


@pytest.mark.parametrize("prune", ["magnitude", "wanda", "sparsegpt"])
def test_half_of_the_experts_weights_are_zero(
    folders: dict[str, Path], tokens: list[int], tmp_path: Path, prune: str
) -> None:
    make(folders["MixtralForCausalLM"], tmp_path / "out", tokens, "bf16", sparsity="2:4", prune=prune)
    checkpoint = open_checkpoint(tmp_path / "out")
    params = LayerStack(checkpoint, 64).params(1)
    checkpoint.close()
    for name in ("mlp.experts.gate_up.weight", "mlp.experts.down.weight"):
        assert ((params[name] == 0).view(len(params[name]), -1, 4).sum(-1) >= 2).all()
    assert (params["mlp.router.weight"] == 0).float().mean() < 0.01


@pytest.mark.parametrize(
    "name, scheme, method, stored",
    [
        ("Qwen3MoeForCausalLM", "int4", "rtn", "compressed-tensors int4 g32, int4"),
        ("DeepseekV3ForCausalLM", "int8", "rtn", "compressed-tensors int8"),
        ("GraniteMoeForCausalLM", "w8a8", "rtn", "compressed-tensors int8"),
    ],
)
def test_the_engine_multiplies_the_codes_of_experts(
    folders: dict[str, Path], tokens: list[int], tmp_path: Path, name: str, scheme: str, method: str, stored: str
) -> None:
    make(folders[name], tmp_path / "out", tokens, scheme, method)
    checkpoint = open_checkpoint(tmp_path / "out")
    model = load_model(checkpoint, spec_from_config(checkpoint.config, 64), dtype=None)
    mixture = model.blocks[1].ffn
    assert isinstance(mixture, layers.Experts)
    assert all(isinstance(stack.scheme, Packed) for stack in mixture.stacks())
    with LLM(str(tmp_path / "out"), skip_tokenizer_init=True, progress=False) as llm:
        (output,) = llm.generate([tokens[:20]], use_tqdm=False)
        assert [one.value for one in output.applied if one.kind == "weights"] == [stored]
        assert output.outputs[0].token_ids
