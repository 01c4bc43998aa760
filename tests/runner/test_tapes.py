"""A replayed step is the step: the same bits, the same errors, for every family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams, ops
from penstock.engine.plan import Draft, RowResult
from penstock.models.spec import FAMILIES
from penstock.ops import cpu
from penstock.ops.cpu.runtime.tape import Tape
from penstock.runner.cpu.buffers import Shape
from penstock.runner.cpu.runner import Runner
from penstock.runner.cpu.tapes import Tapes
from penstock.text.prompt_encoder import Encoded
from tests.same_tokens.roads import Guessing, alone, answer, drafted, tiny_llm, tiny_model

VARIANTS = [
    (name, variant) for name, family in FAMILIES.items() for variant in range(len(family.like)) if name != "BertModel"
]
UNTAPED = ("Mamba2ForCausalLM",)  # run on references, which torch computes
PROMPTS = [[5, 6, 7], [8], [9] * 20, [3, 4]]
PARAMS = [
    SamplingParams(max_tokens=count, temperature=0.7, seed=1, logprobs=1, ignore_eos=True, detokenize=False)
    for count in (14, 9, 14, 5)
]


def runner(llm: LLM) -> Runner:
    found: Runner = llm.service.engine.executor  # type: ignore
    return found


def answers(llm: LLM) -> list[Any]:
    llm.reset_prefix_cache()
    return [answer(output) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[LLM]:
    former = cpu.num_threads()
    with tiny_llm(tiny_model(tmp_path, "LlamaForCausalLM")) as llm:
        yield llm
    cpu.set_num_threads(former)


@pytest.mark.parametrize(("architecture", "variant"), VARIANTS)
def test_every_family_is_replayed(architecture: str, variant: int, tmp_path: Path) -> None:
    """Breaks when a layer computes with torch, or keeps a tensor that a replay does not write."""
    with tiny_llm(tiny_model(tmp_path, architecture, variant), max_num_batched_tokens=23) as llm:
        tapes = runner(llm).tapes
        tapes.enabled = False
        expected = answers(llm)
        tapes.enabled = True
        assert [answers(llm) for _ in range(3)] == [expected] * 3
        if architecture in UNTAPED:
            assert tapes.obstacles and not tapes.num_replayed
            return
        assert tapes.num_recorded >= 3 and tapes.num_replayed > tapes.num_recorded
        assert tapes.obstacles == []


class Trees(Guessing):
    """Guesses trees of one shape: the right line behind a wrong one, so that it is moved."""

    verifies_trees = True

    def _guess(self, state: Any, outcome: RowResult) -> tuple[Draft, ...]:
        ahead = list(self.known[tuple(state.request.tokens)])[state.num_generated :]
        if len(ahead) < 4:
            return ()
        return tuple(Draft(*one) for one in ((1, -1), (2, 0), (ahead[0], -1), (1, 2), (ahead[1], 2)))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "BloomForCausalLM"])
def test_steps_that_verify_trees_are_replayed(architecture: str, tmp_path: Path) -> None:
    """Breaks when torch computes in such a step, or when a replay reads the paths of the step that was recorded."""
    with tiny_llm(tiny_model(tmp_path, architecture)) as llm:
        params = [one.clone(max_tokens=40) for one in PARAMS]
        expected = alone(llm, PROMPTS, params)
        for prompt, one, wanted in zip(PROMPTS, params, expected):
            assert drafted(llm, [prompt], [one], [wanted], Trees) == [wanted]
        tapes: Any = runner(llm).tapes
        shapes = [shape for shape, tape in tapes._known.items() if shape.has_trees and isinstance(tape, Tape)]
        assert shapes == [Shape(6, 1, 6, has_trees=True, has_adapters=False)] and tapes.obstacles == []
        assert llm.stats()["num_accepted_tokens"] > 80


def test_every_path_and_number_of_threads(llama: LLM) -> None:
    """What was recorded on another path is void: breaks when a tape outlives the change."""
    tapes = runner(llama).tapes
    for path in [*cpu.paths(), *cpu.paths()]:
        with cpu.override_path(path):
            tapes.enabled = False
            expected = answers(llama)
            tapes.enabled = True
            before = tapes.num_replayed
            assert answers(llama) == expected and answers(llama) == expected
            assert (tapes.num_replayed > before) == (path != "reference")
            cpu.set_num_threads(3 - cpu.num_threads() % 2)
            assert answers(llama) == expected


def test_few_shapes_are_kept(llama: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runner.cpu.tapes.MAX_SHAPES", 2)
    expected = answers(llama)
    assert answers(llama) == expected and answers(llama) == expected
    assert len(runner(llama).tapes._known) <= 2


def test_a_model_that_computes_with_torch_runs_on(llama: LLM, caplog: pytest.LogCaptureFixture) -> None:
    expected, tapes = answers(llama), runner(llama).tapes
    model: Any = runner(llama).model
    forward = model.forward
    model.forward = lambda *given: forward(*given) * 1.0
    tapes.__init__()  # type: ignore[misc]
    with caplog.at_level("DEBUG", "penstock"):
        assert [answers(llama) for _ in range(3)] == [expected] * 3
    del model.forward
    assert tapes.num_recorded == tapes.num_replayed == 0 and len(tapes.obstacles) >= 3
    assert len([record for record in caplog.records if "torch computes aten.mul" in record.message]) >= 1


def test_an_error_in_a_replayed_step_is_survived(llama: LLM) -> None:
    """A token past the vocabulary, on the device alone, is noticed by the kernel that reads it; the step is redone."""
    expected = answers(llama)
    answers(llama)
    collectors = [llama.service.submit(Encoded(prompt), params) for prompt, params in zip(PROMPTS, PARAMS)]
    for _ in range(4):
        llama.service.step()
    before = runner(llama).tapes.num_replayed
    runner(llama).rows[1].state.tokens[-1] = 10**6
    llama.service.step()
    assert runner(llama).tapes.num_replayed == before + 1
    while not all(collector.finished for collector in collectors):
        llama.service.step()
    outputs = [collector.output() for collector in collectors]
    assert [output.error is None for output in outputs] == [True] * 4 and llama.stats()["num_failed_steps"] == 1
    assert [answer(output) for output in outputs] == expected


def test_the_second_of_a_shape_is_recorded() -> None:
    calls: list[None] = []
    tapes: Tapes[torch.Tensor] = Tapes()
    x = torch.ones(2, 3)

    def compute() -> torch.Tensor:
        calls.append(None)
        return ops.scale(x, 2.0)

    results = [tapes.run("shape", compute).tolist() for _ in range(5)]
    assert len(calls) == 2 and tapes.num_replayed == 3 and results == [[[2.0] * 3] * 2] * 5
    x.fill_(3.0)
    assert tapes.run("shape", compute)[0, 0] == 6.0 and len(calls) == 2
    tapes.run("other", compute)
    assert len(calls) == 3
