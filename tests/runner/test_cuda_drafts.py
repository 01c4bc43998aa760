"""Drafts on the GPU's runner, without a GPU and one plan ahead."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

from penstock import StructuredOutputsParams  # noqa: E402
from penstock.config.speculation import SpeculativeConfig  # noqa: E402
from penstock.draft.drafters import make_drafters  # noqa: E402
from penstock.engine.plan import Draft, Plan, Result, RowResult  # noqa: E402
from penstock.engine.scheduling.speculation import SpeculationController  # noqa: E402
from penstock.errors import PenstockError  # noqa: E402
from tests.llm.tiny import write_config, write_tokenizer  # noqa: E402
from tests.runner.test_cuda_runner import PROMPTS, answers, asking, engines, no_gpu  # noqa: E402, F401  a fixture

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")


class Drafting:
    """Hands drafts to the scheduler with every token: the right continuation, its third token spoilt."""

    verifies_trees = False

    def __init__(self, executor: Any, known: dict[tuple[int, ...], Sequence[int]]) -> None:
        self.executor, self.known = executor, known
        self.errors: list[str] = []
        self.num_unknown = 0  # drafts after a token that only the device knows

    def start(self, plan: Plan) -> Any:
        ticket, rows = self.executor.start(plan), self.executor.rows
        for row in plan.rows:
            self.num_unknown += bool(row.draft) and -1 in rows[row.row].inputs(row)
        outer, wait = self, ticket.result

        class Waiting:
            def result(self) -> Result:
                return outer.finish(plan, wait())

        return Waiting()

    def finish(self, plan: Plan, result: Result) -> Result:
        if result.error:
            self.errors.append(result.error)
        told = [RowResult((row,)) if isinstance(row, int) else row for row in result.rows]
        for row, outcome in zip(plan.rows, told):
            state = self.executor.rows[row.row].state
            ahead = self.known[tuple(state.request.tokens)][state.num_generated :][:4] if outcome.tokens else ()
            outcome.draft = tuple(Draft(1 if i == 2 else token, i - 1) for i, token in enumerate(ahead))
        result.rows = told
        return result

    def control(self, message: object) -> Any:
        return self.executor.control(message)

    def close(self) -> None:
        self.executor.close()


def test_drafts_are_placed_after_tokens_that_only_the_device_knows_or_refused(tmp_path: Path, no_gpu: None) -> None:
    """Breaks if a draft is packed where the unknown token belongs, or if a row whose start is an upper bound runs."""
    params = [asking(max_tokens=20), asking(max_tokens=20, presence_penalty=0.3, logprobs=1)]
    with engines(write_config(tmp_path, "LlamaForCausalLM")) as (usual, other):
        expected = answers(usual, PROMPTS[:2], params)
        engine: Any = other.service.engine
        known = {tuple(prompt): found[0][0] for prompt, found in zip(PROMPTS, expected)}
        drafting = engine.executor = Drafting(engine.executor, known)
        assert answers(other, PROMPTS[:2], params) == expected
        stats = other.stats()
    assert stats["num_accepted_tokens"] > 4 and drafting.num_unknown > 2
    assert drafting.errors and all("verifies a draft of it, has ended" in error for error in drafting.errors)
    assert drafting.errors[0].startswith("RuntimeError: row ")


def wait_for_drafts(engine: Any) -> None:
    """As `assemble` does for a GPU."""
    scheduler = engine.scheduler
    scheduler._exact_starts = scheduler._builder._exact_starts = scheduler._fast_path._exact_starts = True


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_scripted_drafts_change_no_answer_and_are_never_refused(
    tmp_path: Path, no_gpu: None, architecture: str
) -> None:
    """Lines that are right in part, beside other rows, prompts in chunks, and rows whose drafts the host verifies."""
    kinds: list[dict[str, Any]] = [{}, {"logprobs": 2}, {"presence_penalty": 0.3, "logprobs": 1}, {"top_k": 1}, {}]
    params = [asking(max_tokens=24 + i, **kind) for i, kind in enumerate(kinds)]
    with engines(write_config(tmp_path, architecture)) as (usual, other):
        expected = answers(usual, PROMPTS, params)
        engine: Any = other.service.engine
        wait_for_drafts(engine)
        known = {tuple(prompt): found[0][0] for prompt, found in zip(PROMPTS, expected)}
        drafting = engine.executor = Drafting(engine.executor, known)
        for _ in range(2):  # the second time from the prefix cache
            assert answers(other, PROMPTS, params) == expected
        stats = other.stats()
    assert not drafting.errors and drafting.num_unknown == 0
    assert stats["num_accepted_tokens"] > 60 and stats["num_draft_tokens"] > stats["num_accepted_tokens"]


class Branching(Drafting):
    """A wrong token beside each right one."""

    def finish(self, plan: Plan, result: Result) -> Result:
        result = super().finish(plan, result)
        for outcome in result.rows:
            assert isinstance(outcome, RowResult)
            if outcome.draft:
                outcome.draft = (*outcome.draft, Draft(2, -1, 0.1))
        return result


@pytest.mark.parametrize("trees", [False, True])
def test_trees_are_cut_to_lines_or_refused(tmp_path: Path, no_gpu: None, trees: bool) -> None:
    """Breaks when a tree is verified as if it were a line."""
    params = [asking(max_tokens=20)]
    with engines(write_config(tmp_path, "LlamaForCausalLM")) as (usual, other):
        expected = answers(usual, PROMPTS[:1], params)
        engine: Any = other.service.engine
        wait_for_drafts(engine)
        assert not engine.executor.verifies_trees
        engine.scheduler.plan_trees(trees)
        drafting = engine.executor = Branching(engine.executor, {tuple(PROMPTS[0]): expected[0][0][0]})
        if trees:
            with pytest.raises(PenstockError, match="verifies a tree of 5 draft tokens, and a GPU verifies lines"):
                other.generate(PROMPTS[:1], params, use_tqdm=False)
        else:
            assert answers(other, PROMPTS[:1], params) == expected and not drafting.errors
            assert other.stats()["num_accepted_tokens"] > 4


def test_drafts_of_rows_that_give_way(tmp_path: Path, no_gpu: None) -> None:
    """A cache too small for all: rows are preempted with drafts in flight and come again."""
    folder = write_config(tmp_path)
    params = [asking(max_tokens=28) for _ in PROMPTS]
    with engines(folder) as (usual, _):
        expected = answers(usual, PROMPTS, params)
    known = {tuple(prompt): found[0][0] for prompt, found in zip(PROMPTS, expected)}
    with engines(folder, kv_cache_tokens=160) as (_, other):
        engine: Any = other.service.engine
        wait_for_drafts(engine)
        drafting = engine.executor = Drafting(engine.executor, known)
        assert answers(other, PROMPTS, params) == expected
        stats = other.stats()
    assert stats["num_preemptions"] > 0 and stats["num_accepted_tokens"] > 20 and not drafting.errors


def test_other_rows_go_on_while_one_verifies_drafts(tmp_path: Path, no_gpu: None) -> None:
    """Only the first prompt is drafted for. Breaks when a draft of one row ends overlap for all."""
    params = [asking(max_tokens=24) for _ in PROMPTS]
    with engines(write_config(tmp_path, "LlamaForCausalLM")) as (usual, other):
        expected = answers(usual, PROMPTS, params)
        engine: Any = other.service.engine
        wait_for_drafts(engine)
        known = {tuple(prompt): (() if i else found[0][0]) for i, (prompt, found) in enumerate(zip(PROMPTS, expected))}
        drafting = engine.executor = Drafting(engine.executor, known)
        beside = 0  # plans that were started while another one verified
        start = engine.scheduler.schedule

        def schedule() -> Plan | None:
            nonlocal beside
            is_verifying = any(row.draft for plan, _ in engine._started for row in plan.rows)
            plan: Plan | None = start()
            beside += is_verifying and plan is not None
            return plan

        engine.scheduler.schedule = schedule
        assert answers(other, PROMPTS, params) == expected
        assert other.stats()["num_accepted_tokens"] > 4 and beside > 3 and not drafting.errors


@pytest.mark.parametrize("method", ["ngram", "lookahead"])
def test_drafters_follow_the_rows_of_a_gpu(tmp_path: Path, no_gpu: None, method: str) -> None:
    """The engine's own drafters: a text that repeats itself is verified several tokens at a time."""
    prompts = [[7, 8, 9, 10, 11, 12] * 6, [20, 21, 22, 23] * 8]
    params = [asking(max_tokens=40, logit_bias={token: 80.0 for token in prompt[:4]}) for prompt in prompts]
    with engines(write_config(tmp_path)) as (usual, other):
        expected = answers(usual, prompts, params)
        engine: Any = other.service.engine
        wait_for_drafts(engine)
        drafters = make_drafters(SpeculativeConfig(method))
        engine.executor.rows.drafters, engine.scheduler._speculation = drafters, SpeculationController()
        engine.scheduler._speculation._count_paying = lambda paths, num_rows: len(paths)
        assert answers(other, prompts, params) == expected
        stats = other.stats()
    assert stats["num_accepted_tokens"] > 5 and stats["num_failed_steps"] == 0


SCHEMA = {
    "type": "object",
    "properties": {"first name": {"type": "integer"}, "second name": {"type": "boolean"}},
    "required": ["first name", "second name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_text_that_a_grammar_forces_is_drafted(tmp_path: Path, no_gpu: None, is_deterministic: bool) -> None:
    """A schema's keys come several tokens at a time, verified by the host; with penalties, too. With
    deterministic kernels the device samples every token, so there are none."""
    write_tokenizer(tmp_path)
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 1, "temperature": 0.9, "seed": 3},
        {"presence_penalty": 0.4, "logprobs": 1},
        {},
    ]
    form = StructuredOutputsParams(json=SCHEMA)
    params = [asking(max_tokens=200, ignore_eos=False, structured_outputs=form, **kind) for kind in kinds]
    params[-1] = asking(max_tokens=30)  # beside them, one that drafts nothing
    folder = write_config(tmp_path, vocab_size=320, max_position_embeddings=512)
    with engines(folder, skip_tokenizer_init=False) as (usual, other):
        expected = answers(usual, PROMPTS[:4], params)
        engine: Any = other.service.engine
        wait_for_drafts(engine)
        engine.executor.deterministic = is_deterministic
        engine.executor.rows.drafters = make_drafters(SpeculativeConfig("auto"))
        engine.scheduler._speculation = SpeculationController()
        engine.scheduler._speculation._count_paying = lambda paths, num_rows: len(paths)
        assert answers(other, PROMPTS[:4], params) == expected
        stats = other.stats()
    assert stats["num_failed_steps"] == 0
    drafted, accepted = (stats.get(f"num_{kind}_tokens_of_grammar", 0) for kind in ("draft", "accepted"))
    assert drafted == 0 if is_deterministic else accepted == drafted > 40
