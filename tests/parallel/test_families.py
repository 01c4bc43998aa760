"""Every family over ranks: by outputs the bits of one process, by inputs near them, and the same twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.models.spec import FAMILIES, spec_from_config
from penstock.parallel import OneRank
from penstock.passes.shard import find_sizes
from tests.parallel.group import Group
from tests.parallel.jobs import answer, describe, embed, same_bits

# architecture, variant, ranks, experts dealt out whole: each way to cut a layer at least once
FEW = [
    ("LlamaForCausalLM", 0, 2, False),
    ("LlamaForCausalLM", 1, 4, False),  # fewer key heads than ranks
    ("Qwen3ForCausalLM", 0, 2, False),  # norms of each head
    ("Olmo2ForCausalLM", 0, 4, False),  # norms over all heads, some of which repeat
    ("FalconForCausalLM", 0, 2, False),
    ("BloomForCausalLM", 1, 3, False),  # slopes, and a vocabulary that does not divide
    ("GPT2LMHeadModel", 0, 2, False),
    ("OPTForCausalLM", 2, 2, False),
    ("GraniteForCausalLM", 0, 2, False),
    ("Gemma3ForCausalLM", 0, 4, False),
    ("GptOssForCausalLM", 0, 2, False),  # sinks, experts with biases
    ("GptOssForCausalLM", 0, 4, True),
    ("Qwen2MoeForCausalLM", 0, 2, False),  # a shared expert with a gate
    ("Qwen2MoeForCausalLM", 0, 4, True),
    ("DeepseekV2ForCausalLM", 0, 2, False),
    ("DeepseekV3ForCausalLM", 0, 4, True),
    ("Llama4ForCausalLM", 0, 2, False),  # tempered queries, tokens weighed before their experts
    ("Llama4ForCausalLM", 0, 2, True),
    ("Mamba2ForCausalLM", 0, 2, False),
    ("Mamba2ForCausalLM", 1, 4, False),
]
ALL = [
    (name, variant, size, whole)
    for name, family in FAMILIES.items()
    if name != "BertModel"
    for variant in range(len(family.like))
    for size in (2, 3, 4)
    for whole in ((False, True) if "Experts" in repr(spec_from_config(describe(name, variant)).layers) else (False,))
    if size in find_sizes(spec_from_config(describe(name, variant)), "out", whole)
]
MAX_ERROR = 1e-5  # by inputs, of the first token's logits


def check(group: Group, config: dict[str, Any], size: int, whole: bool, checks_ends: bool = False) -> None:
    expected = answer(OneRank(), config)
    for found in group.run(size, answer, config=config, expert_parallel=whole, checks_ends=checks_ends):
        assert same_bits(found, expected)
    summed = group.run(size, answer, config=config, by="in", expert_parallel=whole)
    again = group.run(size, answer, config=config, by="in", expert_parallel=whole)
    assert all(same_bits(each, summed[0]) for each in summed + again)
    for found, wanted in zip(summed[0]["logits"], expected["logits"]):
        assert np.abs(found[0] - wanted[0]).max() <= MAX_ERROR * np.abs(wanted).max()


@pytest.mark.parametrize(("architecture", "variant", "size", "whole"), FEW)
def test_ranks_give_what_one_process_gives(
    group: Group, architecture: str, variant: int, size: int, whole: bool
) -> None:
    check(group, describe(architecture, variant), size, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "variant", "size", "whole"), [each for each in ALL if each not in FEW])
def test_every_family_over_ranks(group: Group, architecture: str, variant: int, size: int, whole: bool) -> None:
    check(group, describe(architecture, variant), size, whole)


def test_the_last_block_computes_wanted_tokens_alone(group: Group) -> None:
    """Breaks when ranks exchange other rows than those that the last block goes on with."""
    check(group, describe("LlamaForCausalLM"), 2, False, checks_ends=True)


def test_encoders_are_cut(group: Group) -> None:
    config = describe("BertModel")
    expected = embed(OneRank(), config, "out")
    for found in group.run(2, embed, config=config, by="out"):
        assert np.array_equal(found, expected)
    for found in group.run(2, embed, config=config, by="in"):
        assert np.abs(found - expected).max() <= MAX_ERROR


def test_few_covers_every_way_to_cut() -> None:
    """A layer of a new kind must be in FEW, or be cut already."""
    kinds = {name: set(_kinds(name, 0)) for name in FAMILIES}
    assert set().union(*kinds.values()) == {each for name, *_ in FEW for each in kinds[name]} | kinds["BertModel"]


def _kinds(name: str, variant: int) -> list[str]:
    layers = spec_from_config(describe(name, variant)).layers
    return [type(part).__name__ for layer in layers for part in (layer, layer.mixer, layer.ffn)]
