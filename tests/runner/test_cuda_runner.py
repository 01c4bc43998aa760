"""The GPU's runner without a GPU: its rows, packed steps and tickets, all computed by the ops' references on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"      # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

from penstock import LLM, SamplingParams  # noqa: E402
from penstock.ops import registry  # noqa: E402
from penstock.runner.cuda.runner import CudaRunner  # noqa: E402
from penstock.runner.local import LocalExecutor  # noqa: E402
from penstock.runner.memory import BlockMemory  # noqa: E402
from tests.llm.tiny import dummy, runner, write_config  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")
SEQUENCES = 6                             # so that 5 are filled up with one of nobody's
PROMPTS = [[(7 * i + j * j) % 90 + 3 for j in range(4 + 23 * i)] for i in range(5)]


class Moment:
    """An event on a device that has done everything at once."""

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture(params=["LlamaForCausalLM", "Gemma2ForCausalLM"])
def both(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LLM, LLM]]:
    """An engine with a CPU's runner, and one with a GPU's, one plan ahead."""
    monkeypatch.setattr(registry, "REFERENCE_ONLY", {"cpu"})
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))
    folder = write_config(tmp_path, request.param)
    options: dict[str, Any] = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": 48, "kv_cache_dtype": "float32"}
    with dummy(folder, **options) as usual, dummy(folder, **options) as other:
        theirs = runner(other.service)
        memory = BlockMemory(len(theirs.memory.blocks) + 1, 16, theirs.memory.grouping, "float32")
        engine = other.service.engine
        made = CudaRunner(theirs.model, memory, None, SEQUENCES, 48, eager=True)       # type: ignore[arg-type]
        made.warm()
        engine.executor, engine.overlap = LocalExecutor(made), 1
        yield usual, other


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Tokens, why they end, and whose log probabilities were told; the references' last bits depend on the company."""
    outputs = llm.generate(prompts, params, use_tqdm=False)      # type: ignore[arg-type]
    return [[(one.token_ids, one.finish_reason, [list(told) for told in one.logprobs or ()]) for one in output.outputs]
            + [[list(told or ()) for told in output.prompt_logprobs or ()]] for output in outputs]


def asking(**more: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 12, "ignore_eos": True} | more))


def test_chunks_and_single_tokens_in_any_company(both: tuple[LLM, LLM]) -> None:
    """Prompts longer than a step, answers of several lengths, twice: the second time from the prefix cache."""
    usual, other = both
    params = [asking(max_tokens=5 + 4 * i) for i in range(len(PROMPTS))]
    for _ in range(2):
        assert answers(other, PROMPTS, params) == answers(usual, PROMPTS, params)
    stats = other.stats()
    assert stats["num_running"] == stats["num_used_blocks"] == 0 and stats["num_cached_tokens"] > 0


def test_what_only_the_host_chooses(both: tuple[LLM, LLM]) -> None:
    usual, other = both
    kinds: list[dict[str, Any]] = [
        {}, {"top_k": 3, "temperature": 0.9}, {"repetition_penalty": 1.4}, {"allowed_token_ids": [3, 4, 5]},
        {"logprobs": 2}, {"prompt_logprobs": 1}, {"n": 2, "top_p": 0.8, "temperature": 1}]
    params = [asking(seed=7, **kind) for kind in kinds]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(kinds))]
    assert answers(other, prompts, params) == answers(usual, prompts, params)


def test_draws_of_the_device_depend_on_seed_and_position_alone(both: tuple[LLM, LLM]) -> None:
    _, other = both
    params = [asking(temperature=1, seed=i) for i in range(len(PROMPTS))]
    together = answers(other, PROMPTS, params)
    assert together == [answers(other, [prompt], [one])[0] for prompt, one in zip(PROMPTS, params)]
    assert together != answers(other, PROMPTS, [asking(temperature=1, seed=99)] * len(PROMPTS))


def test_damaged_logits_end_their_request_alone(both: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the first row that is sampled, once; the others get what they get without it."""
    _, other = both
    expected = answers(other, PROMPTS, [asking()] * len(PROMPTS))
    model = other.service.engine.executor.runner.model           # type: ignore[attr-defined]
    logits, calls = model.logits, iter(range(1000))

    def damaged(hidden: torch.Tensor, at: torch.Tensor | None = None) -> torch.Tensor:
        values = logits(hidden, at)
        values[0] = torch.nan if next(calls) == 3 else values[0]
        return values

    monkeypatch.setattr(model, "logits", damaged)
    outputs = other.generate(PROMPTS, asking(), use_tqdm=False)      # type: ignore[arg-type]
    failed = [i for i, output in enumerate(outputs) if output.error]
    assert len(failed) == 1 and "NaN" in str(outputs[failed[0]].error)
    for i, output in enumerate(outputs):
        assert i in failed or output.outputs[0].token_ids == expected[i][0][0]
