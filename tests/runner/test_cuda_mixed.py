"""Requests of many kinds at once through the GPU's runner, without a GPU, against the CPU's: whoever chooses a token,
whenever rows come, go, give way to each other and come again."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from threading import current_thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

from penstock import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams  # noqa: E402
from penstock.runner.cuda import graphs as cuda_graphs  # noqa: E402
from penstock.runner.cuda.decode_graphs import DecodeGraphs  # noqa: E402
from penstock.runner.cuda.graphs import GraphPool, Half  # noqa: E402
from penstock.runner.cuda.rows import (
    DeviceParams,  # noqa: E402
    RowTensors,  # noqa: E402
)
from penstock.sampling.grammar.matcher import GrammarFailed, GrammarMatcher  # noqa: E402
from penstock.sampling.row import RowState  # noqa: E402
from penstock.text.answers import Collector  # noqa: E402
from penstock.text.prompt_encoder import Encoded  # noqa: E402
from tests.llm.tiny import write_config, write_tokenizer  # noqa: E402
from tests.runner.test_cuda_runner import PROMPTS, answers, asking, engines, no_gpu  # noqa: E402, F401  a fixture

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")
VOCAB = 320
STRUCTURES = [
    StructuredOutputsParams(regex="[0-9]{3,30}"),
    StructuredOutputsParams(choice=["aa", "ab", "b"]),
    StructuredOutputsParams(regex="(ab|ba|c)*d"),
    StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}, "minItems": 2}),
]


@dataclass(frozen=True)
class Asked:
    arrives: int  # in which step
    prompt: list[int]
    params: SamplingParams | BeamSearchParams
    gone_after: int | None  # tokens of its first answer, after which nobody waits for it any more


def parameters(random: Random) -> dict[str, Any]:
    """Some of what can be asked for; filters leave one token to draw."""
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"repetition_penalty": random.choice([0.6, 1.2, 1.7])},
        lambda: {"frequency_penalty": random.choice([-0.5, 0.4, 1.5]), "presence_penalty": random.choice([0.0, 0.9])},
        lambda: {"logit_bias": {random.randrange(VOCAB): random.uniform(-9, 9) for _ in range(random.randint(1, 9))}},
        lambda: {"allowed_token_ids": random.sample(range(VOCAB), random.choice([3, 40, 300]))},
        lambda: {"min_tokens": random.randint(1, 4), "stop_token_ids": random.sample(range(VOCAB), 60)},
        lambda: {"logprobs": random.choice([0, 3, 40])},
        lambda: {"prompt_logprobs": random.choice([0, 2])},
        lambda: {"bad_words": random.sample(["the", "at", "12", "answer", "zzz", "a cat"], 3)},
        lambda: {"structured_outputs": random.choice(STRUCTURES), "ignore_eos": False},
        lambda: {"structured_outputs": random.choice(STRUCTURES), "frequency_penalty": 0.7, "ignore_eos": False},
        lambda: {"n": random.randint(2, 3)},
        lambda: {"best_of": 3},
        lambda: {
            "temperature": random.choice([0.4, 1.5]),
            "typical_p": random.choice([1.0, 1.0, 0.9]),
            **random.choice([{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]),
        },
    ]
    asked: dict[str, Any] = {}
    for kind in random.sample(kinds, random.choice([0, 1, 1, 2, 3, 4])):
        asked |= kind()
    return asked


def someone(random: Random, beginnings: list[list[int]]) -> Asked:
    prompt = random.choice(beginnings)[: random.choice([2, 9, 17, 33, 60])] + random.sample(range(1, VOCAB), 3)
    params: SamplingParams | BeamSearchParams = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
    if random.random() > 0.06:
        params = asking(max_tokens=random.choice([6, 12, 30, 50]), seed=3, **parameters(random))
    return Asked(random.randint(0, 30), prompt, params, random.choice([None, None, None, None, 1, 4]))


def served(llm: LLM, asked: list[Asked], random: Random) -> list[Any]:
    """What each got, of whoever went away what came until then; now and then a sequence has to give way."""
    service = llm.service
    collectors: list[Collector | None] = [None] * len(asked)
    waiting, step = set(range(len(asked))), 0
    while waiting or service.engine.has_work:
        for i, one in enumerate(asked):
            if one.arrives <= step and collectors[i] is None:
                collectors[i] = service.submit(Encoded(one.prompt), one.params)
        running = service.engine.scheduler.roster.running
        if running and random.random() < 0.1:
            service.engine.scheduler.roster.preempt(random.choice(running))
        service.step()
        for i, collector in enumerate(collectors):
            if collector is not None and i in waiting:
                outputs, gone_after = collector.output().outputs, asked[i].gone_after
                gone = gone_after is not None and bool(outputs) and len(outputs[0].token_ids) >= gone_after
                if collector.finished or gone:
                    service.abort(collector)
                    waiting.remove(i)
        step += 1
    service.engine.scheduler.check()
    return [told(collector, one.gone_after) for collector, one in zip(collectors, asked) if collector is not None]


def told(collector: Collector, gone_after: int | None) -> Any:
    output = collector.output()
    if gone_after is not None and len(output.outputs[0].token_ids) >= gone_after:
        return output.outputs[0].token_ids[:gone_after]
    return (
        [
            (
                one.token_ids,
                one.text,
                one.finish_reason,
                one.stop_reason,
                one.forced_closing,
                [list(one)[:4] for one in one.logprobs or ()],
            )
            for one in output.outputs
        ],
        output.error,
        [list(one or ()) for one in output.prompt_logprobs or ()],
    )


def counted(state: RowState, size: int) -> np.ndarray:
    """As the device counts a row's text."""
    counts = 2 * np.bincount(state.tokens[state.num_prompt :], minlength=size)
    counts[list(set(state.tokens[: state.num_prompt]))] += 1
    return counts


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small steps on a busy machine: threads would wait for each other."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture
def num_counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the host knows all of a text whose next token the device chooses, the device has counted the same: how
    often that was found so."""
    allow, nums = DeviceParams.allow, [0]

    def allowing(self: DeviceParams, row: int, state: RowState, num_generated: int) -> bool:
        allowed = allow(self, row, state, num_generated)
        if allowed and state.has_penalties and state.num_generated == num_generated:
            nums[0] += 1
            assert self.tensors.counts[row].tolist() == counted(state, VOCAB).tolist()
        return allowed

    monkeypatch.setattr(DeviceParams, "allow", allowing)
    return nums


@pytest.mark.parametrize(
    "seed, family", [pytest.param(0, "LlamaForCausalLM", marks=pytest.mark.slow), (1, "Gemma2ForCausalLM")]
)
def test_the_same_answers_in_any_company(
    tmp_path: Path, no_gpu: None, num_counted: list[int], seed: int, family: str
) -> None:
    random = Random(seed)
    beginnings = [random.sample(range(1, VOCAB), 60) for _ in range(3)]
    asked = [someone(random, beginnings) for _ in range(60)]
    with_texts(tmp_path, family)
    with engines(str(tmp_path), skip_tokenizer_init=False, kv_cache_tokens=192) as (usual, other):
        expected, found = served(usual, asked, Random(seed)), served(other, asked, Random(seed))
        for one, mine, theirs in zip(asked, found, expected, strict=True):
            assert mine == theirs, one
        stats = other.stats()
    assert stats["num_used_blocks"] == 0 and not stats["num_failed_steps"] and num_counted[0] > 10


def with_texts(folder: Path, family: str = "LlamaForCausalLM") -> None:
    write_config(folder, family, vocab_size=VOCAB)
    write_tokenizer(folder)


def test_a_text_that_host_and_device_write_in_turns_is_counted_once(
    tmp_path: Path, no_gpu: None, num_counted: list[int]
) -> None:
    """The host looks after a grammar's budget now and then; a neighbour's row_params have the device choose as well."""
    pairs = StructuredOutputsParams(regex="([0-9][a-z]){3,100}")
    params = [
        SamplingParams(
            temperature=0, max_tokens=70, frequency_penalty=0.3, repetition_penalty=1.1, structured_outputs=pairs
        ),
        asking(max_tokens=70, presence_penalty=0.5),
    ]
    turns: list[bool] = []
    with_texts(tmp_path)
    with engines(str(tmp_path), skip_tokenizer_init=False) as (usual, other):
        allow, leave = DeviceParams.allow, DeviceParams.skip

        def allowing(self: DeviceParams, row: int, state: RowState, num_generated: int) -> bool:
            turns.extend([False] * state.is_mask_late(state.num_generated))
            return allow(self, row, state, num_generated)

        def leaving(self: DeviceParams, row: int, state: RowState) -> None:
            turns.append(True)
            leave(self, row, state)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceParams, "allow", allowing)
            patch.setattr(DeviceParams, "skip", leaving)
            found = answers(other, [[5, 6, 7]] * 2, params)
        assert found == answers(usual, [[5, 6, 7]] * 2, params)
        assert other.stats()["num_failed_steps"] == 0
    assert turns.count(True) > 1 and False in turns[turns.index(True) :] and num_counted[0] > 10


def test_a_grammar_that_cannot_go_on_ends_its_request_alone(
    tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else's step fails with it, and whose fault it is is said as on a CPU."""
    params = [
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(regex=regex))
        for regex in ("[0-9]{9,40}", "[a-c]{9,40}")
    ]
    words, calls = GrammarMatcher.bitmask, []

    def failing(self: GrammarMatcher, size: int) -> np.ndarray:
        calls.append(self)
        if self is calls[0] and len(calls) > 6:
            self.mask = self.bitmask  # type: ignore[method-assign, assignment]
            raise GrammarFailed("the grammar cannot go on: too large")
        return words(self, size)

    with_texts(tmp_path)
    with engines(str(tmp_path), skip_tokenizer_init=False) as (usual, other):
        expected = answers(usual, [[5, 6, 7]], params[1:])
        monkeypatch.setattr(GrammarMatcher, "bitmask", failing)
        outputs = other.generate([[5, 6, 7]] * 2, params, use_tqdm=False)
        assert "too large" in str(outputs[0].error) and "Error" not in str(outputs[0].error)
        assert outputs[1].outputs[0].token_ids == expected[0][0][0]
        assert other.stats()["num_failed_steps"] == 0


@pytest.mark.parametrize("where, name", [(GraphPool, "run"), (RowTensors, "admit"), (DecodeGraphs, "sample")])
def test_a_plan_that_fails_costs_nobody_an_answer(
    tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch, where: type, name: str
) -> None:
    """The plan after it was made for the same rows: it must not write into others' blocks."""
    folder = write_config(tmp_path)
    params = [asking(max_tokens=30, **kind) for kind in ({}, {"presence_penalty": 0.4}, {"logprobs": 2}, {}, {})]
    method, calls = getattr(where, name), iter(range(10_000))

    with engines(folder) as (usual, other):
        roster = other.service.engine.scheduler.roster

        def failing(*arguments: Any) -> Any:
            alone = len(roster.running) < 2 or any(one.suspect for one in roster.running + roster.waiting)
            if not alone and next(calls) % 9 == 3:
                raise RuntimeError("out of memory")
            return method(*arguments)

        expected = answers(usual, PROMPTS, params)
        monkeypatch.setattr(where, name, failing)
        assert answers(other, PROMPTS, params) == expected
        assert other.stats()["num_failed_steps"] > 0


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Captures on a device that computes at once: a replay computes nothing."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: SimpleNamespace(id=(0, 1)))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(cuda_graphs, "borrow", torch.clone)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return GraphPool(eager=False, max_num_seqs=8)


def test_sampling_is_captured_after_the_logits_it_reads(graphs: Any) -> None:
    """A capture that failed is tried again, and with it the step that it is part of."""
    made: Iterator[Any] = iter(
        [torch.zeros(1, 9), RuntimeError("out of memory"), torch.zeros(2, 9), AssertionError("captured already")]
    )

    def forward() -> Any:
        value = next(made)
        if isinstance(value, Exception):
            raise value
        return value

    halves: list[Half[Any]] = [Half(forward, is_forward=True)]
    halves.append(Half(lambda: (halves[0].made, halves[0].graph is not None)))
    assert [len(graphs.run(halves[0])), graphs.run(halves[1])[1]] == [1, False]
    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.run(halves[0])
    assert [len(graphs.run(halves[0])), graphs.run(halves[1])[1]] == [2, True]
    assert [len(graphs.run(halves[0])), graphs.run(halves[1])[1]] == [2, True]


def test_captured_buckets_keep_no_logits_of_their_own(graphs: Any) -> None:
    """Breaks if the logits of a bucket live on, captured or not: another could not have their memory."""
    computed: list[weakref.ref[torch.Tensor]] = []

    def forward(size: int) -> torch.Tensor:
        logits = torch.zeros(size, 9)
        computed.append(weakref.ref(logits))
        return logits

    steps = [Half(partial(forward, size), is_forward=True) for size in (1, 2, 4, 8)]
    for half in steps:
        graphs.run(half)
    assert [logits() is None for logits in computed] == [True, True, True, False], "only the last one is of use"
    for half in steps:
        graphs.run(half)
    assert len(computed) == 8 and all(half.graph is not None for half in steps)
    assert [logits() for logits in computed] == [None] * 8


def test_masks_of_many_grammars_are_computed_side_by_side(
    tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if threads change a mask, or if masks are computed one after the other."""
    threads: set[str] = set()
    words = GrammarMatcher.bitmask

    def note(self: GrammarMatcher, size: int) -> Any:
        threads.add(current_thread().name)
        return words(self, size)

    letters = "0-9", "a-z", "ab", "A-Z", "0-9a-f"
    kinds = [StructuredOutputsParams(regex=f"[{some}]{{1,100}}") for some in letters]
    params = [asking(max_tokens=100, structured_outputs=kind) for kind in kinds]
    prompts = [[5, 6, 7 + i] for i in range(len(kinds))]
    with_texts(tmp_path)
    with engines(str(tmp_path), skip_tokenizer_init=False) as (usual, other):
        expected = answers(usual, prompts, params)
        monkeypatch.setattr(GrammarMatcher, "bitmask", note)
        assert answers(other, prompts, params) == expected
    assert any(name.startswith("penstock-masks") for name in threads)
