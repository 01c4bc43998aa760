"""The GPU's runner of encoders without a GPU: its packed steps and tickets, computed by the references on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

from penstock import LLM, PenstockError  # noqa: E402
from penstock.ops import registry  # noqa: E402
from penstock.runner.cuda.encoder import EncoderRunner  # noqa: E402
from tests.llm.tiny import dummy, runner, write_config  # noqa: E402
from tests.runner.test_cuda_runner import Moment  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")
PROMPTS = [[(7 * i + j * j) % 200 + 3 for j in range(1 + 9 * i % 40)] for i in range(23)]
OPTIONS: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 64}


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LLM, LLM]]:
    """An engine with a CPU's runner, and one with a GPU's, one plan ahead."""
    monkeypatch.setattr(registry, "REFERENCE_ONLY", {"cpu"})
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    folder = write_config(tmp_path, "BertModel")
    with dummy(folder, **OPTIONS) as usual, dummy(folder, **OPTIONS) as other:
        engine = other.service.engine
        made = EncoderRunner(runner(other.service).model, 5, 64, torch.device("cpu"))  # type: ignore[arg-type]
        made.warm()
        engine.executor, engine.overlap = made, 1
        yield usual, other


def embeddings(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    return torch.tensor([output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)])


def test_many_sequences_in_steps_of_a_few(both: tuple[LLM, LLM]) -> None:
    """Breaks if a sequence's tokens, positions or tiles are another's."""
    usual, other = both
    found = embeddings(other, PROMPTS)
    assert (found - embeddings(usual, PROMPTS)).abs().max() < 1e-5 and found.std(0).mean() > 0.01
    assert other.stats()["max_batch_size"] > 1 and other.stats()["num_running"] == 0
    alone = torch.cat([embeddings(other, [prompt]) for prompt in PROMPTS[:4]])
    assert (found[:4] - alone).abs().max() < 1e-5


def test_a_prompt_that_fills_a_step(both: tuple[LLM, LLM]) -> None:
    usual, other = both
    prompts = [[5] * 64, [6] * 64, [7]]
    assert (embeddings(other, prompts) - embeddings(usual, prompts)).abs().max() < 1e-5


def test_an_embedding_that_is_no_number(both: tuple[LLM, LLM]) -> None:
    _, other = both
    model: Any = other.service.engine.executor.model  # type: ignore[attr-defined]
    model.embedding.norm.weight[0] = float("inf")
    with pytest.raises(PenstockError, match="the embedding contains NaN or infinity"):
        other.embed([1, 2, 3], use_tqdm=False)


def test_a_step_that_fails_fails_its_requests(both: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    _, other = both
    model: Any = other.service.engine.executor.model  # type: ignore[attr-defined]

    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(PenstockError, match="no such kernel"):
        other.embed([1, 2, 3], use_tqdm=False)
    monkeypatch.undo()
