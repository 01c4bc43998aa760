"""Answers with a drafting model are those without, bit for bit, whatever it drafts and whatever a request asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.models.spec import FAMILIES
from penstock.runner.cpu.draft_lines import LineDrafter
from tests.agreement.reference import model_path
from tests.same_tokens import test_speculation as kinds
from tests.same_tokens.roads import Always, Answer, alone, answer, chunked, displaced, tiny_llm, tiny_model, together
from tests.same_tokens.test_speculation import FEW

PAIRS = [
    pytest.param(("LlamaForCausalLM", "MistralForCausalLM"), id="a draft model with windows"),
    pytest.param(("Gemma3ForCausalLM", "LlamaForCausalLM"), id="a target with windows", marks=pytest.mark.slow),
]
LENGTH = 5


def prompts() -> list[list[int]]:
    return kinds.prompts()[: len(kinds.KINDS)]


def params() -> list[SamplingParams]:
    return kinds.params()[: len(kinds.KINDS)]


class AlwaysAhead(Always):
    """The model drafts at every step, whatever a text promises."""

    def __init__(self, price: float = -100.0) -> None:
        super().__init__()
        self.ahead.price = price

    def choose_ahead(self, num_rows: int) -> int:
        return LENGTH


def make(model: str, draft: str, **options: Any) -> LLM:
    config = {"method": "self", "layers": [0]} if draft == "self" else {"method": "draft_model", "model": draft}
    llm = tiny_llm(model, speculative_config={**config, "num_speculative_tokens": LENGTH}, **options)
    scheduler: Any = llm.service.engine.scheduler
    scheduler._speculation = AlwaysAhead()
    return llm


def require_drafts(llm: LLM, least: int) -> None:
    """The drafter did not fail, and some drafts were right and some wrong."""
    executor: Any = llm.service.engine.executor
    assert isinstance(executor.drafter, LineDrafter) and not executor.drafter._has_failed
    stats = llm.stats()
    assert stats["num_draft_tokens"] > stats["num_accepted_tokens"] > least


def require_all_right(llm: LLM, drafter: str, least: int) -> None:
    """None of the model's own drafts was rejected; texts may have drafted beside it."""
    stats = llm.stats()
    assert stats[f"num_accepted_tokens_of_{drafter}"] == stats[f"num_draft_tokens_of_{drafter}"] > least


@pytest.fixture(scope="module", params=PAIRS)
def known(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, list[Answer]]]:
    folder, (target, draft) = tmp_path_factory.mktemp("pair"), request.param
    model = tiny_model(folder / "target", target)
    with tiny_llm(model) as llm:
        yield model, tiny_model(folder / "draft", draft), alone(llm, prompts(), params())


@pytest.mark.parametrize("kind", ["another", "self"])
def test_together_and_again(known: tuple[str, str, list[Answer]], kind: str) -> None:
    """The second time prefixes are cached, with what the draft model had computed of them."""
    model, draft, answers = known
    with make(model, "self" if kind == "self" else draft) as llm:
        assert together(llm, prompts(), params()) == answers
        assert together(llm, prompts(), params()) == answers
        require_drafts(llm, 20)


def test_texts_draft_beside_the_model(known: tuple[str, str, list[Answer]]) -> None:
    """Each row takes what promises more: drafts of all kinds stand in one step."""
    model, draft, answers = known
    with make(model, draft) as llm:
        scheduler: Any = llm.service.engine.scheduler
        scheduler._speculation = AlwaysAhead(price=0.0)
        for _ in range(2):
            assert together(llm, prompts(), params()) == answers
        stats = llm.stats()
        assert min(stats[f"num_accepted_tokens_of_{name}"] for name in ("draft_model", "ngram", "suffix")) > 0


@pytest.mark.parametrize("kind", ["another", "self"])
def test_chunked_and_preempted(known: tuple[str, str, list[Answer]], kind: str) -> None:
    model, draft, answers = known
    draft = "self" if kind == "self" else draft
    with make(model, draft, kv_cache_tokens=192, max_model_len=96, max_num_batched_tokens=40) as llm:
        assert chunked(llm, prompts(), params(), seed=1) == answers
        require_drafts(llm, 5)
    with make(model, draft, scheduling_policy="priority", max_num_seqs=1) as llm:
        assert displaced(llm, prompts(), params()) == answers
        assert llm.stats()["num_preemptions"] > 0
        require_drafts(llm, 10)


def test_siblings(known: tuple[str, str, list[Answer]]) -> None:
    model, draft, answers = known
    with make(model, draft) as llm:
        outputs = llm.generate(prompts(), [one.clone(n=3) for one in params()], use_tqdm=False)
        assert [answer(output) for output in outputs] == answers
        require_drafts(llm, 20)


def test_the_controller_itself(known: tuple[str, str, list[Answer]]) -> None:
    model, draft, answers = known
    with tiny_llm(model, speculative_config={"model": draft}) as llm:
        for _ in range(2):
            assert together(llm, prompts(), params()) == answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("skips", [False, True], ids=["the same model", "no layer skipped"])
def test_a_drafter_equal_to_the_target_is_always_right(tmp_path: Path, temperature: float, skips: bool) -> None:
    """Draft tokens are drawn with the target's own counter, so that none is rejected at any temperature."""
    model = tiny_model(tmp_path, "LlamaForCausalLM")
    common: dict[str, Any] = dict(max_tokens=30, ignore_eos=True, detokenize=False, temperature=temperature)
    asked = [SamplingParams(seed=i, **common) for i in range(len(prompts()))]
    asked[3] = asked[3].clone(presence_penalty=0.5, top_k=9)
    asked[4] = asked[4].clone(allowed_token_ids=FEW, n=3)
    config = {"method": "self", "layers": [0, 1]} if skips else {"method": "draft_model", "model": model}
    with tiny_llm(model, speculative_config={**config, "num_speculative_tokens": LENGTH}) as llm:
        scheduler: Any = llm.service.engine.scheduler
        scheduler._speculation = AlwaysAhead()
        for _ in range(2):
            llm.generate(prompts(), asked, use_tqdm=False)
        require_all_right(llm, "self" if skips else "draft_model", 200)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["the same model", "self"])
def test_a_tree_of_the_same_model_always_has_the_next_token(tmp_path: Path, temperature: float, kind: str) -> None:
    """Each node's first child is the target's own token: a tree is right as deep as it goes, and the answers are those
    without drafts."""
    model = tiny_model(tmp_path, "LlamaForCausalLM")
    common: dict[str, Any] = dict(max_tokens=30, ignore_eos=True, detokenize=False, temperature=temperature)
    asked = [SamplingParams(seed=i, logprobs=1, **common) for i in range(len(prompts()))]
    asked[3] = asked[3].clone(presence_penalty=0.5, top_k=9)
    asked[4] = asked[4].clone(allowed_token_ids=FEW, n=3)
    config = {"method": "self", "layers": [0, 1]} if kind == "self" else {"method": "draft_model", "model": model}
    with tiny_llm(model) as llm:
        expected = [answer(one) for one in llm.generate(prompts(), asked, use_tqdm=False)]
    with tiny_llm(model, speculative_config={**config, "num_speculative_tokens": LENGTH, "tree": True}) as llm:
        scheduler: Any = llm.service.engine.scheduler
        scheduler._speculation = AlwaysAhead()
        for _ in range(2):
            assert [answer(one) for one in llm.generate(prompts(), asked, use_tqdm=False)] == expected
        stats = llm.stats()
        assert stats["num_accepted_at_0"] == stats["num_drafts"] > 100
        assert stats["num_accepted_tokens"] < stats["num_draft_tokens"]  # siblings
        assert stats["num_accepted_at_1"] > 50


def test_a_left_behind_model_catches_up(tmp_path: Path) -> None:
    """It rests for a while, then drafts again as if it had never rested: none of its tokens is rejected."""

    class Resting(AlwaysAhead):
        def choose_ahead(self, num_rows: int) -> int:
            self.count = getattr(self, "count", 0) + 1
            return 0 if self.count % 16 < 12 else LENGTH

    model = tiny_model(tmp_path, "LlamaForCausalLM")
    one = SamplingParams(max_tokens=60, ignore_eos=True, detokenize=False, temperature=1.0, seed=1)
    config = {"method": "draft_model", "model": model, "num_speculative_tokens": LENGTH}
    with tiny_llm(model, speculative_config=config, max_num_batched_tokens=16) as llm:
        scheduler: Any = llm.service.engine.scheduler
        scheduler._speculation = Resting()
        for _ in range(2):
            llm.generate(prompts()[:6], [one] * 6, use_tqdm=False)
        require_all_right(llm, "draft_model", 100)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize("kind", ["the same", "self"])
def test_every_family(tmp_path: Path, architecture: str, kind: str) -> None:
    model = tiny_model(tmp_path, architecture)
    with tiny_llm(model) as llm:
        spec: Any = llm.service.engine.executor.model.spec  # type: ignore[attr-defined]
        if spec.is_encoder or any(state and state.kind == "recurrent" for state in spec.states()):
            pytest.skip("it cannot verify drafts")
        answers = alone(llm, prompts(), params())
    with make(model, model if kind == "the same" else "self") as llm:
        assert together(llm, prompts(), params()) == answers
        assert chunked(llm, prompts(), params(), seed=2) == answers
        assert llm.stats()["num_accepted_tokens"] > 20


def test_a_drafter_that_fails_costs_no_answer(
    known: tuple[str, str, list[Answer]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    model, draft, answers = known
    monkeypatch.setattr("penstock.draft.net.decoder.DecoderNet.logits", fail)
    with make(model, draft) as llm:
        assert together(llm, prompts(), params()) == answers
        stats = llm.stats()
        assert stats["num_failed_steps"] == stats.get("num_draft_tokens_of_draft_model", 0) == 0
        assert stats["num_accepted_tokens_of_ngram"] > 0  # texts go on
    assert "answers go on without its drafts" in caplog.text


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORM = StructuredOutputsParams(json=SCHEMA)


def test_grammars_and_stop_strings_on_text() -> None:
    """SmolLM2 drafts for itself with a third of its layers: under a schema, with stop strings, three at once."""
    asked = [
        SamplingParams(temperature=0.0, max_tokens=16, structured_outputs=FORM),
        SamplingParams(temperature=0.9, seed=3, max_tokens=16, structured_outputs=FORM, n=3),
        SamplingParams(temperature=0.7, seed=4, max_tokens=16, stop=[" the"], min_tokens=4, logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=16, stop=["."], frequency_penalty=0.3, ignore_eos=True),
    ]
    texts = ["Describe a person:", "A person as JSON:", "Once upon a time", "The largest planet"]
    found = []
    for layers in ((), (0, 1, 2, 3, 4, 5, 6, 20, 27, 28, 29)):
        config = {"method": "self", "layers": list(layers), "num_speculative_tokens": LENGTH} if layers else None
        with LLM(str(model_path("smollm2")), progress=False, max_model_len=256, speculative_config=config) as llm:
            if layers:
                scheduler: Any = llm.service.engine.scheduler
                scheduler._speculation = AlwaysAhead()
            outputs = llm.generate(texts, asked, use_tqdm=False)
            found.append(
                [(one.text, one.token_ids, one.finish_reason, str(one.logprobs)) for o in outputs for one in o.outputs]
            )
            if layers:
                assert llm.stats()["num_draft_tokens"] > 30
    assert found[0] == found[1]


@pytest.mark.parametrize("draft", ["self", "model"])
def test_the_longest_answer_fits_with_its_drafts(draft: str, tmp_path: Path) -> None:
    """The places ahead are beside the cache that was asked for."""
    model = tiny_model(tmp_path / "target", "LlamaForCausalLM")
    small = {"kv_cache_tokens": 96, "max_model_len": 96, "block_size": 16}
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with make(model, "self" if draft == "self" else model, **small) as llm:
        (output,) = llm.generate([list(range(10, 20))], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 86


def test_rows_catch_up_within_one_step_s_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows are behind: a step of all they have missed would stall every stream."""
    from penstock.runner.cpu import drafting

    model = tiny_model(tmp_path / "target", "LlamaForCausalLM")
    given = [[10 + row, *range(20, 50)] for row in range(6)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    monkeypatch.setattr(drafting, "MAX_CATCH_UP", 40)
    with make(model, model) as llm:
        executor: Any = llm.service.engine.executor
        run, counts = executor.drafter._run, []

        def count(step: Any, rows: Any, at: Any, features: Any, kind: str) -> Any:
            counts.append(sum(row.count for row in step.rows) if kind == "catch up" else 0)
            return run(step, rows, at, features, kind)

        monkeypatch.setattr(executor.drafter, "_run", count)
        found = [list(output.outputs[0].token_ids) for output in llm.generate(given, params, use_tqdm=False)]
    with tiny_llm(model) as plain:
        expected = [list(output.outputs[0].token_ids) for output in plain.generate(given, params, use_tqdm=False)]
    assert found == expected and 0 < max(counts) <= 40
