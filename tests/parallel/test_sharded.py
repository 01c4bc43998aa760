"""Sharded models on the roads that a model takes: taped, quantized, from GGUF, with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.parallel import OneRank
from tests.agreement.reference import model_path
from tests.parallel.group import Group
from tests.parallel.jobs import adapt, answer, answer_folder, describe, replay, same_bits
from tests.same_tokens.roads import tiny_model

WIDE = dict(hidden_size=128, intermediate_size=256)  # shares that are whole groups of 32
SLACK = 1.06  # bytes of a rank over its share: norms, and tables of rope


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GptOssForCausalLM", "OlmoeForCausalLM"])
def test_steps_with_exchanges_are_replayed(group: Group, architecture: str, tmp_path: Path) -> None:
    """Breaks when a rank computes with torch, or an exchange is left out of a tape."""
    folder = tiny_model(tmp_path, architecture)
    expected, counts, _ = replay(OneRank(), folder, "out")
    assert expected is not None
    for found in group.run(2, replay, folder=folder, by="out"):
        assert found == (expected, counts, [])
    summed = group.run(2, replay, folder=folder, by="in")
    assert summed[0] == summed[1]
    assert summed[0][0] is not None and summed[0][1:] == (counts, [])


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("LlamaForCausalLM", dict(quantization="int4")),
        ("LlamaForCausalLM", dict(quantization="int8", rounded=False)),
        ("Qwen2MoeForCausalLM", dict(quantization="int4")),
    ],
)
def test_quantized_while_loading(group: Group, architecture: str, options: dict[str, Any]) -> None:
    """Activations are rounded in groups of the whole input: by outputs nothing changes."""
    config = describe(architecture, **(WIDE if architecture == "LlamaForCausalLM" else {}))
    expected = answer(OneRank(), config, **options)
    for found in group.run(2, answer, config=config, **options):
        assert same_bits(found, expected)


def test_unquantizable_shares_are_refused(group: Group) -> None:
    config = describe("LlamaForCausalLM", intermediate_size=96)
    with pytest.raises(AssertionError, match="rounds 32 inputs together, which ranks with 16 inputs cut apart: cut"):
        group.run(4, answer, config=config, by="in", quantization="int8")


def near(found: Any, expected: Any, tolerance: float) -> bool:
    """True if the first token's logits of each row are near."""
    pairs = zip(found["logits"], expected["logits"])
    return all(np.abs(mine[0] - wanted[0]).max() <= tolerance * np.abs(wanted).max() for mine, wanted in pairs)


@pytest.mark.slow
def test_a_gguf_file_over_three_ranks(group: Group) -> None:
    """SmolLM2 has 9 heads and 3 key heads; each rank holds a third of the file's blocks."""
    given = dict(folder=str(model_path("smollm2")))
    expected = answer_folder(OneRank(), **given)
    for found in group.run(3, answer_folder, **given):
        assert same_bits(found, expected)
        assert found["bytes"] <= SLACK * expected["bytes"] / 3
    exact = answer_folder(OneRank(), **given, rounded=False)
    for found in group.run(3, answer_folder, **given, by="in", rounded=False):
        assert near(found, exact, 1e-5)
        assert found["bytes"] <= SLACK * expected["bytes"] / 3


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_blocks_of_256_over_ranks(group: Group, size: int) -> None:
    """Gemma 3 has one key head, which every rank has, and K-quants."""
    given = dict(folder=str(model_path("gemma3-270m")))
    expected = answer_folder(OneRank(), **given)
    for found in group.run(size, answer_folder, **given):
        assert same_bits(found, expected)
        assert found["bytes"] <= 1.1 * expected["bytes"] / size


@pytest.mark.parametrize("size", [2, 4])
def test_adapters_are_cut_as_their_linears(group: Group, size: int, lora_lab: tuple[str, list[str]]) -> None:
    """Rows with several adapters, with one and with none in one step."""
    base, adapters = lora_lab
    expected = adapt(OneRank(), base, adapters, "out")
    assert len({str(each) for each in expected}) == len(expected)
    for found in group.run(size, adapt, folder=base, adapters=adapters, by="out"):
        assert found == expected
    summed = group.run(size, adapt, folder=base, adapters=adapters, by="in")
    assert all(each == summed[0] for each in summed)
    firsts = [(mine[1][0][0][1], wanted[1][0][0][1]) for mine, wanted in zip(summed[0], expected)]
    assert all(abs(mine - wanted) <= 1e-4 for mine, wanted in firsts)
