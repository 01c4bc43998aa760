"""Every family over ranks: by outputs the bits of one process, by inputs the same twice and near them."""

from __future__ import annotations

import pytest

from penstock.parallel import OneRank
from tests.parallel.group import Group
from tests.parallel.jobs import answer, describe, same_bits

FEW = [("LlamaForCausalLM", 0, 2), ("LlamaForCausalLM", 0, 4)]


@pytest.mark.parametrize(("architecture", "variant", "size"), FEW)
def test_by_outputs_the_bits_are_those_of_one_rank(group: Group, architecture: str, variant: int, size: int) -> None:
    config = describe(architecture, variant)
    expected = answer(OneRank(), config)
    for found in group.run(size, answer, config=config):
        assert same_bits(found, expected)
