"""Steps that are captured while the engine is idle, on a device that computes at once: a replay computes the half anew
from the inputs of its bucket, padding included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

from penstock import LLM  # noqa: E402
from penstock.models.decoder import Decoder  # noqa: E402
from penstock.runner.cuda import mixed_graphs  # noqa: E402
from penstock.runner.cuda.graphs import GraphPool, Half  # noqa: E402
from penstock.runner.cuda.mixed_graphs import sequence_buckets, token_buckets  # noqa: E402
from penstock.runner.cuda.runner import CudaRunner  # noqa: E402
from penstock.runner.memory import BlockMemory  # noqa: E402
from tests.llm.tiny import dummy, runner, write_config  # noqa: E402
from tests.runner.test_cuda_runner import PROMPTS, answers, asking, no_gpu  # noqa: E402, F401  a fixture

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")
SEQUENCES, TOKENS = 6, 48


def capture(self: GraphPool, half: Half[Any]) -> None:
    def replay() -> None:
        half.made = half.function()

    replay()
    half.graph = SimpleNamespace(replay=replay)  # type: ignore[assignment]
    self.num_captures += 1


@contextmanager
def engines(folder: str, deterministic: bool = False) -> Iterator[tuple[LLM, LLM, CudaRunner]]:
    options: dict[str, Any] = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": TOKENS, "kv_cache_dtype": "float32"}
    with dummy(folder, **options) as usual, dummy(folder, **options) as other:
        theirs = runner(other.service)
        memory = BlockMemory(len(theirs.memory.blocks) + 1, 16, theirs.memory.grouping, "float32")
        made = CudaRunner(theirs.model, memory, theirs.rows.grammars, SEQUENCES, TOKENS, deterministic=deterministic)  # type: ignore[arg-type]
        made.warm()
        engine = other.service.engine
        engine.executor, engine.overlap = made, 1
        yield usual, other, made


@pytest.fixture
def captures(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(GraphPool, "capture", capture)
    monkeypatch.setattr(GraphPool, "_keep_only", lambda self, half: None)
    monkeypatch.setattr(mixed_graphs, "MIXED_SEQUENCES", (2,))


@pytest.mark.parametrize(
    "architecture, deterministic",
    [
        ("LlamaForCausalLM", False),
        ("Gemma2ForCausalLM", True),
        pytest.param("LlamaForCausalLM", True, marks=pytest.mark.slow),
        pytest.param("Gemma2ForCausalLM", False, marks=pytest.mark.slow),
    ],
)
def test_no_step_of_a_request_is_new(
    tmp_path: Path, captures: None, monkeypatch: pytest.MonkeyPatch, architecture: str, deterministic: bool
) -> None:
    """Breaks if a step of a prepared engine is captured or launched kernel by kernel while a request waits, or if
    padding changes an answer."""
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.4},
        {"logprobs": 2},
        {"temperature": 0.8, "seed": 3},
        {},
    ]
    params = [asking(max_tokens=5 + 4 * i, **kind) for i, kind in enumerate(kinds)]
    with engines(write_config(tmp_path, architecture), deterministic) as (usual, other, made):
        while made.prepare():
            pass
        pool, num_launched = made._graphs.pool, 0
        num_captures, forward = pool.num_captures, Decoder.forward

        def count(self: Decoder, *args: Any) -> Any:
            nonlocal num_launched
            num_launched += 1
            return forward(self, *args)

        monkeypatch.setattr(Decoder, "forward", count)
        for step in made._mixed._known.values():
            assert step.forward.graph is not None
        greedy = [index for index, kind in enumerate(kinds) if "temperature" not in kind]
        for _ in range(2):
            expected, found = answers(usual, PROMPTS, params), answers(other, PROMPTS, params)
            assert [found[index] for index in greedy] == [expected[index] for index in greedy]
        assert pool.num_captures == num_captures > 20
        assert num_launched and not made._graphs.num_wanted and not made._mixed.num_wanted


def test_until_it_is_captured_a_larger_step_stands_in(tmp_path: Path, captures: None) -> None:
    """The first request comes when a few steps are captured: those stand in, steps that nothing can stand in for are
    captured when they come again, and what was wanted most is captured next."""
    params = [asking(max_tokens=9 + 5 * i) for i in range(len(PROMPTS))]
    with engines(write_config(tmp_path)) as (usual, other, made):
        for _ in range(2):
            assert made.prepare()
        graphs = made._graphs
        assert [key[0] for key in graphs._known] == [SEQUENCES, 1] and not made._mixed._known
        assert answers(other, PROMPTS, params) == answers(usual, PROMPTS, params)
        assert [key[0] for key in graphs._known] == [SEQUENCES, 1] and graphs.num_wanted
        assert 0 < len(made._mixed._known) < len(made._mixed.buckets())
        wanted, count = graphs.num_wanted.most_common(1)[0]
        assert count > max(made._mixed.num_wanted.values())
        assert made.prepare() and graphs._is_captured(wanted)


def test_nothing_is_captured_while_kernels_are_compiled(tmp_path: Path, captures: None) -> None:
    with engines(write_config(tmp_path)) as (_, _, made):
        done = Event()
        assert made.prepare(done) and made._graphs.pool.num_captures == 0
        done.set()
        assert made.prepare(done) and made._graphs.pool.num_captures > 0


def test_an_engine_whose_captures_fail_goes_on(tmp_path: Path, captures: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: GraphPool, half: Half[Any]) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(GraphPool, "capture", fail)
    with engines(write_config(tmp_path)) as (usual, other, made):
        assert not made.prepare()
        assert made._mixed.pick(20, 2) is None, "padding would cost time and gain nothing"
        params = [asking(max_tokens=9)] * len(PROMPTS)
        assert answers(other, PROMPTS, params) == answers(usual, PROMPTS, params)


def test_without_idle_moments_steps_that_come_often_are_captured(tmp_path: Path, captures: None) -> None:
    """An offline engine is never idle."""
    with engines(write_config(tmp_path)) as (usual, other, made):
        prompts = [[5 + i] * 20 for i in range(30)]
        params = [asking(max_tokens=2 + i % 5) for i in range(30)]
        assert answers(other, prompts, params) == answers(usual, prompts, params)
        assert any(map(made._mixed._is_captured, made._mixed._known))


def test_buckets_have_room_and_little_padding() -> None:
    assert token_buckets(48) == [16, 32, 48] and sequence_buckets(6) == [6] and sequence_buckets(256) == [8, 64, 256]
    sizes = token_buckets(8192)
    for count in range(1, sizes[-1]):
        least = next(size for size in sizes if size >= count)
        assert least - count < max(16, count / 2) and (count < 256 or least - count < max(128, count / 8))
