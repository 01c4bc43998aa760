"""Experts in both of their spellings, and what each token is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock import layers, ops
from penstock.errors import InvalidModel
from penstock.models.decoder import Decoder, linears
from penstock.models.files import open_checkpoint
from penstock.models.load import load_model
from penstock.models.spec import FAMILIES, ModelSpec, spec_from_config
from penstock.ops import FORMATS, OpTable, RouterRule
from penstock.quant.dense import Dense
from penstock.quant.packed import Packed
from tests.models import oracle
from tests.models.paged import Paged
from tests.models.stored import Stored

NAME = "MixtralForCausalLM"
CONFIG: dict[str, Any] = {"architectures": [NAME], **FAMILIES[NAME].like[0]}
PROMPTS = [[1, 5, 9, 200, 31], [7, 8]]


def stacked() -> dict[str, torch.Tensor]:
    """The tensors as transformers holds them: all experts of a layer in one."""
    return {name: tensor.detach() for name, tensor in oracle.make(NAME, FAMILIES[NAME].like[0]).named_parameters()}


def split(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same as published checkpoints have them: three matrices per expert."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.partition(".mlp.")
        above = f"{layer}.block_sparse_moe"
        if part == "gate.weight":
            found[f"{above}.gate.weight"] = tensor
        elif part:
            for index, matrix in enumerate(tensor):
                parts = matrix.chunk(2) if part == "experts.gate_up_proj" else [matrix]
                for spelled, one in zip(("w1", "w3") if len(parts) == 2 else ("w2",), parts):
                    found[f"{above}.experts.{index}.{spelled}.weight"] = one
        else:
            found[name] = tensor
    return found


def load(tensors: dict[str, torch.Tensor]) -> Decoder:
    model = load_model(Stored(CONFIG, tensors), spec_from_config(CONFIG))
    assert isinstance(model, Decoder)
    return model


def answers(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [torch.stack(row.logits) for row in Paged(load(tensors)).run(PROMPTS, 8, chunk=4)]


def test_both_spellings_give_the_same_bits() -> None:
    whole = stacked()
    assert all(torch.equal(a, b) for a, b in zip(answers(whole), answers(split(whole)), strict=True))


def test_a_missing_expert_is_named() -> None:
    tensors = split(stacked())
    del tensors["model.layers.1.block_sparse_moe.experts.3.w1.weight"]
    with pytest.raises(InvalidModel, match=r"layers\.1\.block_sparse_moe\.experts\.3\.w1\.weight' .* is missing"):
        load(tensors)


def test_every_expert_is_used_and_each_token_by_few() -> None:
    model = load(stacked())
    experts = model.blocks[0].ffn
    assert isinstance(experts, layers.Experts)
    assert [name for name, _, part in linears(model) if part is experts] == ["layers.0.mlp.router"]
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    ids, weights = model.ops.route(experts.router.linear.scheme.matmul(x), None, experts.router.rule)
    assert ids.shape == (64, 2) and ids.unique().tolist() == [0, 1, 2, 3] and (ids[:, 0] < ids[:, 1]).all()
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(64))


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_what_chooses_experts_is_not_quantized(kind: str) -> None:
    config = {"architectures": ["Qwen2MoeForCausalLM"], **FAMILIES["Qwen2MoeForCausalLM"].like[0]}
    model = load_model(None, spec_from_config(config), dummy_seed=0, quantization=kind)
    experts = model.blocks[0].ffn
    assert isinstance(experts, layers.Experts) and experts.shared_gate is not None
    assert isinstance(experts.router.linear.scheme, Dense) and isinstance(experts.shared_gate.scheme, Dense)
    assert isinstance(experts.gate_up.scheme, Packed) and isinstance(experts.down.scheme, Packed)


def test_a_sparse_mixer_weighs_logits_of_zero() -> None:
    logits = torch.tensor([[0.0] * 5, [-1.0, 0.0, 0.0, -2.0, 0.0], [-3.0, -3.0, 0.0, -3.0, -3.0]])
    rule = RouterRule(2, "sparsemixer", jitter=0.01)
    for route in (ops.route, OpTable("cpu").route):
        ids, weights = route(logits, None, rule)
        assert ids.tolist() == [[0, 1], [1, 2], [0, 2]]
        torch.testing.assert_close(weights, torch.tensor([[1 / 5, 1 / 4], [1 / 3, 1 / 2], [1 / 4, 1.0]]))


def change(**values: Any) -> ModelSpec:
    return spec_from_config(CONFIG | values)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        (
            NAME,
            {"num_experts_per_tok": 5},
            "num_experts_per_tok=5 is out of range: it must be a whole number from 1 to 4",
        ),
        (NAME, {"num_local_experts": 5000}, "num_local_experts=5000 is out of range"),
        (NAME, {"intermediate_size": 100}, "intermediate_size=100 is not supported with experts: .* multiple of 16"),
        ("Glm4MoeForCausalLM", {"n_group": 3}, "n_group=3 does not divide 8 experts"),
        ("Glm4MoeForCausalLM", {"n_group": 8}, "n_group=8 does not divide 8 experts into groups of at least 2"),
        ("Glm4MoeForCausalLM", {"n_group": 4, "topk_group": 1}, "num_experts_per_tok=3 is more than the 2 experts"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [7]}, "mlp_only_layers=.* different whole numbers from 0 to 1"),
        ("Qwen3MoeForCausalLM", {"moe_router_kind": "new"}, "moe_router_kind='new' is unknown"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
    ],
)
def test_what_is_not_understood_is_named(name: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidModel, match=said):
        spec_from_config({"architectures": [name], **FAMILIES[name].like[0]} | values)


def test_counts_that_do_not_match_the_tensors_are_named() -> None:
    tensors, apart = stacked(), split(stacked())
    wider = {name: tensor.repeat(2, 1) if name.endswith("gate.weight") else tensor for name, tensor in tensors.items()}
    stack = r"gate_up_proj' has shape \[4, 192, 64\], but its config says \[8, 192, 64\]"
    with pytest.raises(InvalidModel, match=stack):
        load_model(Stored(CONFIG, wider), change(num_local_experts=8))
    fewer = {name: tensor[:3] if name.endswith("gate.weight") else tensor for name, tensor in apart.items()}
    with pytest.raises(InvalidModel, match=r"experts\.3\.\w+\.weight' has no place .* do not belong together"):
        load_model(Stored(CONFIG, fewer), change(num_local_experts=3))


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def test_mxfp4_stacks_are_multiplied_by_their_codes(tmp_path: Path) -> None:
    """gpt-oss as it is published: gates and ups in turn, 4-bit floats with an exponent for every 32."""
    theirs = oracle.make("GptOssForCausalLM", FAMILIES["GptOssForCausalLM"].like[0])
    generator, tensors = torch.Generator().manual_seed(0), dict(theirs.state_dict())
    for name, parameter in theirs.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        count, width, num_out = parameter.shape
        blocks = torch.randint(0, 256, (count, num_out, width // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (count, num_out, width // 32), generator=generator, dtype=torch.uint8)
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(3).long()
        values = torch.cat([FP4, -FP4])[codes] * torch.exp2(scales.float() - 127)[..., None]
        parameter.data = values.flatten(2).transpose(1, 2).contiguous()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del tensors[name]
    config = json.loads((oracle.save(theirs, tmp_path / "plain") / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    ours = load_model(checkpoint, spec_from_config(checkpoint.config), dtype=None, rounded=False)
    assert isinstance(ours, Decoder) and isinstance(ours.blocks[0].ffn, layers.Experts)
    for stack in (ours.blocks[0].ffn.gate_up, ours.blocks[0].ffn.down):
        scheme: Any = stack.scheme
        assert [part.format for part in scheme.parts] == [FORMATS["MXFP4"]]
    for row in Paged(ours).run(PROMPTS, 12, chunk=16):
        expected, found = oracle.logits(theirs, row.tokens[:-1]), torch.stack(row.logits)
        assert expected.std() > 0.1 and (found - expected).abs().max() <= 1e-4 * expected.abs().max()
