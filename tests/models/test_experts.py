"""Experts in both of their spellings, and what each token is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import layers
from penstock.errors import InvalidModel
from penstock.models.decoder import Decoder, linears
from penstock.models.load import load_model
from penstock.models.spec import FAMILIES, spec_from_config
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
    names = [name for name, _, part in linears(model) if part is experts]
    assert names[:3] == ["layers.0.mlp.router", "layers.0.mlp.experts.0.gate_up", "layers.0.mlp.experts.0.down"]
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weights = model.ops.route(experts.router.scheme.matmul(x), experts.num_chosen)
    assert (weights > 0).sum(dim=1).tolist() == [2] * 64 and (weights > 0).any(dim=0).all()
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(64))
