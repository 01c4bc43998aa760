"""The GPU's runner without a GPU: its rows, packed steps and tickets, all computed by the ops' references on a CPU."""

from __future__ import annotations

import gc
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

from penstock import LLM, SamplingParams, StructuredOutputsParams  # noqa: E402
from penstock.ops import registry  # noqa: E402
from penstock.runner.cuda.rows import DeviceParams  # noqa: E402
from penstock.runner.cuda.runner import CudaRunner  # noqa: E402
from penstock.runner.cuda.ticket import StepTicket  # noqa: E402
from penstock.runner.memory import BlockMemory  # noqa: E402
from penstock.sampling.row import RowState  # noqa: E402
from tests.llm.tiny import dummy, runner, write_config, write_tokenizer  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")
SEQUENCES = 6  # so that 5 are filled up with one of nobody's
PROMPTS = [[(7 * i + j * j) % 90 + 3 for j in range(4 + 23 * i)] for i in range(5)]


class Moment:
    """An event on a device that has done everything at once."""

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Moment) -> float:
        return 2.0


@contextmanager
def engines(folder: str, **more: Any) -> Iterator[tuple[LLM, LLM]]:
    """An engine with a CPU's runner, and one with a GPU's, one plan ahead."""
    options: dict[str, Any] = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": 48, "kv_cache_dtype": "float32"}
    with dummy(folder, **options, **more) as usual, dummy(folder, **options, **more) as other:
        theirs = runner(other.service)
        memory = BlockMemory(len(theirs.memory.blocks) + 1, 16, theirs.memory.grouping, "float32")
        engine = other.service.engine
        made = CudaRunner(theirs.model, memory, theirs.rows.grammars, SEQUENCES, 48, eager=True)  # type: ignore[arg-type]
        made.warm()
        made.store = theirs.store
        engine.executor, engine.overlap = made, 1
        yield usual, other


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REFERENCE_ONLY", {"cpu"})
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))


@pytest.fixture(params=["LlamaForCausalLM", "Gemma2ForCausalLM"])
def both(request: pytest.FixtureRequest, tmp_path: Path, no_gpu: None) -> Iterator[tuple[LLM, LLM]]:
    with engines(write_config(tmp_path, request.param)) as made:
        yield made


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Tokens, why they end, and whose log probabilities were told; the references' last bits depend on the company."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [(one.token_ids, one.finish_reason, [list(told) for told in one.logprobs or ()]) for one in output.outputs]
        + [[list(told or ()) for told in output.prompt_logprobs or ()]]
        for output in outputs
    ]


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


@pytest.mark.parametrize("lost", [False, True])
def test_prefixes_from_a_store(tmp_path: Path, no_gpu: None, lost: bool) -> None:
    """Saved beside steps that run ahead, and loaded; a block that is lost then makes its step begin anew."""
    with engines(write_config(tmp_path, "LlamaForCausalLM"), kv_offloading_size=0.01) as (usual, other):
        params = [asking(max_tokens=5 + 4 * i) for i in range(len(PROMPTS))]
        expected = answers(usual, PROMPTS, params)
        assert answers(other, PROMPTS, params) == expected
        engine: Any = other.service.engine
        engine.scheduler.cache.tree.clear()
        if lost:
            memory = engine.executor.store._memory
            for name in list(memory)[::3]:
                memory[name] = memory[name][:-1]
        assert answers(other, PROMPTS, params) == expected
        stats = other.stats()
        assert stats["num_saved_blocks"] > 5 and (stats["num_lost_restores"] > 0) == lost
        assert stats["num_restored_tokens"] > 0 and stats["num_used_blocks"] == 0


ON_HOST: list[dict[str, Any]] = [
    {},
    {"typical_p": 0.4, "temperature": 0.9},
    {"logprobs": 40},
    {"prompt_logprobs": 1},
    {"n": 2, "typical_p": 0.8, "temperature": 1},
    {"repetition_penalty": 1.3, "logprobs": 33},
]
ON_DEVICE: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.9, "presence_penalty": -0.4},
    {"logprobs": 2},
    {"allowed_token_ids": [3, 4, 5], "logprobs": 0},
    {"logit_bias": {4: 6.0, 9: -8.0}},
    {"top_k": 1, "temperature": 0.9},
    {"top_p": 1e-6, "temperature": 2.0},
    {"min_p": 1.0, "temperature": 1.0, "logprobs": 5},
]


@pytest.mark.parametrize("kinds", [ON_HOST, ON_DEVICE])
def test_whoever_chooses_the_choice_is_the_same(both: tuple[LLM, LLM], kinds: list[dict[str, Any]]) -> None:
    usual, other = both
    params = [asking(seed=7, **kind) for kind in kinds]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(kinds))]
    choose = StepTicket._sample
    with mock.patch.object(StepTicket, "_sample", autospec=True, side_effect=choose) as by_host:
        assert answers(other, prompts, params) == answers(usual, prompts, params)
    assert by_host.called == (kinds is ON_HOST)


def test_a_closed_runner_is_gone(tmp_path: Path, no_gpu: None) -> None:
    """Breaks when weights and cache outlive their engine, at which the collector does not look once it is warm."""
    gc.collect()
    with engines(write_config(tmp_path, "LlamaForCausalLM")) as (_, other):
        steps = weakref.ref(cast(Any, other.service.engine.executor)._graphs)
        answers(other, PROMPTS[:1], [asking()])
        gc.freeze()
    try:
        other.close()
        del other
        gc.collect()
        assert steps() is None
    finally:
        gc.unfreeze()


def test_stops_that_wait_and_words_that_do_not_come(both: tuple[LLM, LLM]) -> None:
    """min_tokens ends in the middle of an answer; a bad word's last token is ruled out after its first."""
    usual, other = both
    free = answers(usual, PROMPTS[:1], [asking()])[0][0][0]
    kinds: list[dict[str, Any]] = [
        {"min_tokens": 6, "stop_token_ids": [free[2], free[7]]},
        {"stop_token_ids": [free[2]]},
        {"min_tokens": 2, "stop_token_ids": [free[1], free[4]], "logprobs": 1},
    ]
    params = [asking(**kind) for kind in kinds]
    assert answers(other, PROMPTS[:1] * 3, params) == answers(usual, PROMPTS[:1] * 3, params)


def test_structured_answers(tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the device while they are far from their end, by the host near it."""
    folder = write_config(tmp_path, vocab_size=320)
    write_tokenizer(tmp_path)
    structures = [
        StructuredOutputsParams(regex="[0-9]{3,30}"),
        StructuredOutputsParams(choice=["aa", "ab"]),
        StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}, "minItems": 2}),
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=length, structured_outputs=structure, bad_words=words)
        for structure in structures
        for length in (90, 6)
        for words in ([], ["12"])
    ]
    num_late = 0
    allow = DeviceParams.allow

    def allowing(self: DeviceParams, row: int, state: RowState, num_generated: int) -> bool:
        nonlocal num_late
        num_late += state.is_mask_late(state.num_generated)
        return allow(self, row, state, num_generated)

    monkeypatch.setattr(DeviceParams, "allow", allowing)
    with engines(folder, skip_tokenizer_init=False) as (usual, other):
        assert answers(other, [[5, 6, 7]] * len(params), params) == answers(usual, [[5, 6, 7]] * len(params), params)
        drawn = [
            SamplingParams(temperature=1.2, max_tokens=120, top_p=0.9, seed=seed, structured_outputs=structures[0])
            for seed in range(9)
        ]
        for output in other.generate([[5, 6, 7]] * 9, drawn, use_tqdm=False):
            assert re.fullmatch("[0-9]{3,30}", output.outputs[0].text)
    assert num_late > 50


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
    model = other.service.engine.executor.model  # type: ignore[attr-defined]
    logits, calls = model.logits, iter(range(1000))

    def damaged(hidden: torch.Tensor, at: torch.Tensor | None = None, adapters: None = None) -> torch.Tensor:
        values = logits(hidden, at)
        values[0] = torch.nan if next(calls) == 3 else values[0]
        return values

    monkeypatch.setattr(model, "logits", damaged)
    outputs = other.generate(PROMPTS, asking(), use_tqdm=False)
    failed = [i for i, output in enumerate(outputs) if output.error]
    assert len(failed) == 1 and "NaN" in str(outputs[failed[0]].error)
    for i, output in enumerate(outputs):
        assert i in failed or output.outputs[0].token_ids == expected[i][0][0]
