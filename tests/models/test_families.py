"""Every family against transformers on each of its tiny configs, through our loader.

Our greedy answer is read back by the oracle in one pass: if at every position the oracle's best token is the one we
chose, its own greedy continuation is the same, token by token.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.models.decoder import Decoder
from penstock.models.files import open_checkpoint
from penstock.models.load import load_model
from penstock.models.spec import FAMILIES, spec_from_config
from penstock.passes.load import load_lowered
from tests.models import oracle
from tests.models.paged import Paged

NUM_NEW = 48
PROMPT_LENGTHS = (1, 7, 38)

CASES = [
    pytest.param(name, like, id=f"{name}-{number}")
    for name, family in FAMILIES.items()
    for number, like in enumerate(family.like)
    if name != "BertModel"
]


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@pytest.mark.parametrize(("architecture", "like"), CASES)
def test_equals_transformers(architecture: str, like: dict[str, Any], tmp_path: Path) -> None:
    theirs = oracle.make(architecture, like)
    checkpoint = open_checkpoint(oracle.save(theirs, tmp_path))
    spec = spec_from_config(checkpoint.config)
    ours = load_model(checkpoint, spec)  # plain layers
    assert isinstance(ours, Decoder)
    oracle.resolve_rope(theirs, spec.max_model_len)

    driver = Paged(ours)
    rows = driver.run(prompts(spec.vocab_size), NUM_NEW, chunk=16)
    for row in rows:
        expected = oracle.logits(theirs, row.tokens[:-1])
        found = torch.stack(row.logits)
        assert found.shape == expected.shape
        assert expected.std() > 0.1, "the oracle's logits say nothing"
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
        prompt = len(row.tokens) - NUM_NEW
        assert expected[prompt - 1 :].argmax(-1).tolist() == row.tokens[prompt:]
    lowered = load_lowered(checkpoint, spec)
    assert isinstance(lowered, Decoder)
    for row, same in zip(rows, Paged(lowered).run(prompts(spec.vocab_size), NUM_NEW, chunk=16)):
        assert torch.equal(torch.stack(row.logits), torch.stack(same.logits)), "fused layers give other bits"
    windows = [state for state in spec.states() if state is not None and state.kind == "window"]
    assert bool(driver.num_freed) == bool(windows)
    assert spec.num_parameters == oracle.count_values(theirs)


@pytest.mark.parametrize(
    ("architecture", "like"),
    [
        pytest.param(name, like, id=f"{name}-{number}")
        for name, family in FAMILIES.items()
        for number, like in enumerate(family.like)
    ],
)
def test_saved_config_says_the_same_as_the_tiny_one(architecture: str, like: dict[str, Any], tmp_path: Path) -> None:
    """The tiny configs hold a few keys in the old or the new spelling; transformers saves all of them in the new."""
    model_class = oracle.find_class(architecture)
    model_class.config_class(**like, architectures=[architecture]).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    tiny = spec_from_config({"architectures": [architecture], **like})
    assert replace(spec_from_config(saved), init_std=tiny.init_std) == tiny
