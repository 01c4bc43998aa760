"""Weights and cache in 8-bit floats on a GPU, against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("no GPU with 8-bit floats", allow_module_level=True)

from tests.gpu.test_engine import LENGTH, PROMPTS, answers, engine, ids, log_probabilities, model  # noqa: E402

__all__ = ["model"]
CACHE, WEIGHTS = {"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("options", "least", "most"), [
    (CACHE, 0.85, 0.03), (WEIGHTS, 0.75, 0.04), (CACHE | WEIGHTS, 0.7, 0.05)], ids=["cache", "weights", "both"])
def test_near_transformers(model: tuple[Path, Any], options: dict[str, str], least: float, most: float,    # noqa: F811
                           dtype: str, eager: bool) -> None:
    """Rounded on the CPU, the same weights and activations choose 0.86 of the oracle's tokens, at a mean difference of
    0.014."""
    folder, oracle = model
    with engine(folder, dtype=dtype, enforce_eager=eager, **options) as llm:
        outputs = answers(llm, PROMPTS, logprobs=1)
    same, differences = 0, []
    for prompt, answer, output in zip(PROMPTS, ids(outputs), outputs):
        expected = log_probabilities(oracle, prompt, answer)
        same += sum(a == b for a, b in zip(answer, expected.argmax(-1).tolist()))
        differences += [abs(found[token].logprob - expected[at, token].item()) for at, (token, found) in enumerate(
            zip(answer, output.outputs[0].logprobs or ()))]
    assert len(differences) == LENGTH * len(PROMPTS)
    print(f"{dtype} {options}: {same / len(differences):.3f} {sum(differences) / len(differences):.4f}")
    assert same >= least * len(differences)
    assert sum(differences) / len(differences) <= most


@pytest.mark.parametrize("options", [CACHE, WEIGHTS, CACHE | WEIGHTS], ids=["cache", "weights", "both"])
def test_recorded_steps_go_on_like_eager_ones(model: tuple[Path, Any], options: dict[str, str]) -> None:   # noqa: F811
    """In float32; one that lies between two codes may be rounded otherwise and take another way."""
    found = []
    for eager in (True, False):
        with engine(model[0], dtype="float32", enforce_eager=eager, **options) as llm:
            found.append(ids(answers(llm, PROMPTS)))
    assert sum(a == b for a, b in zip(*found)) >= len(PROMPTS) - 2


def test_a_shared_prefix_is_read_from_an_8_bit_cache(model: tuple[Path, Any]) -> None:                     # noqa: F811
    """40 sequences with 600 tokens in common, and each alone; a key of its own may be rounded otherwise."""
    common = [(j * j) % 1000 for j in range(600)]
    prompts = [common + [(i * 31 + j) % 1000 for j in range(5 + i)] for i in range(40)]
    with engine(model[0], dtype="float32", **CACHE) as llm:
        answers(llm, prompts[:1])
        together = ids(answers(llm, prompts))
        alone = [ids(answers(llm, [prompt]))[0] for prompt in prompts[:8]]
    assert sum(a == b for a, b in zip(together, alone)) >= len(alone) - 1
