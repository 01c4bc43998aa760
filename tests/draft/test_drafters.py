"""Drafters on their own: what they propose, whose text they read, and what they learn."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.api.vllm.porting import port_options
from penstock.config import EngineConfig
from penstock.config.speculation import MODEL_METHODS, SpeculativeConfig, parse_speculation
from penstock.draft.acceptance import Acceptance
from penstock.draft.drafters import Drafters, RowDrafts, make_drafters
from penstock.draft.ngram import NgramDrafter
from penstock.draft.prediction import PredictionDrafter
from penstock.draft.suffix import EarlierAnswers, SuffixDrafter
from penstock.draft.text_index import END
from penstock.errors import InvalidConfig
from penstock.sampling.row import RowState
from penstock.types import BeamSearchParams, Request


def row(prompt: list[int], answer: list[int] | None = None, **more: Any) -> RowState:
    request = Request(id="r", tokens=tuple(prompt), max_tokens=100, **more)
    return RowState(request, 0, [*prompt, *(answer or [])], len(prompt))


def line(drafts: RowDrafts | None, most: int = 8, min_chance: float = 0.0) -> list[int]:
    assert drafts is not None
    return [draft.token for draft in drafts.propose(most, min_chance)]


def test_prompt_lookup() -> None:
    state = row([1, 2, 3, 4, 5, 6, 9, 2, 3])
    drafts = make_drafters(SpeculativeConfig("ngram")).start(state)  # type: ignore[union-attr]
    assert line(drafts, 3) == [4, 5, 6]
    for token in (4, 7):
        state.append(token)
    assert line(drafts) == []
    assert line(Drafters([NgramDrafter(3)], 8).start(row([1, 2, 9, 1, 2]))) == []


def test_a_draft_ends_with_the_answer() -> None:
    request = Request(id="r", tokens=(1, 2, 3, 1, 2), max_tokens=2, eos_token_ids=(3,))
    state = RowState(request, 0, [1, 2, 3, 1, 2], 5)
    drafts = Drafters([NgramDrafter()], 8).start(state)
    assert line(drafts) == [3]  # one token is sampled anyway, and one more may follow
    state.append(3)
    assert line(drafts) == []


def test_beams_are_not_drafted() -> None:
    beam = BeamSearchParams(beam_width=2, max_tokens=4)
    assert Drafters([NgramDrafter()], 8).start(row([1, 2, 3], beam=beam)) is None


def test_earlier_answers_of_the_same_tenant_alone() -> None:
    """Breaks when one tenant's answers are proposed to another."""
    drafter = SuffixDrafter()
    drafters = Drafters([drafter], 8)
    drafters.finish(row([5, 6], [7, 8, 9], tenant="a", salt="x"))
    assert line(drafters.start(row([5, 6], tenant="a", salt="x"))) == [7, 8, 9]
    assert line(drafters.start(row([5, 6], tenant="b", salt="x"))) == []
    assert line(drafters.start(row([5, 6], tenant="a", salt="y"))) == []
    drafters.finish(row([5, 6], [], tenant="a", salt="x"))
    assert drafter.answers.num_tokens == 6  # nothing was answered


def test_earlier_answers_are_bounded() -> None:
    answers = EarlierAnswers(max_tokens=200)
    for i in range(100):
        answers.add(("t", "s"), range(1000 * i, 1000 * i + 20))
        assert answers.num_tokens <= 200
    index = answers.of(("t", "s"))
    assert index is not None and index.find([99_000, 99_001]) is not None and index.find([0, 1]) is None
    for i in range(300):
        answers.add((f"t{i}", "s"), range(30))
        assert answers.num_tokens <= 200
    assert answers.of(("t", "s")) is None
    answers.add(("long", "s"), range(10_000))
    assert answers.num_tokens <= 200


@pytest.mark.parametrize("is_right", [True, False])
def test_chances_are_those_that_were_shown(is_right: bool) -> None:
    """A drafter that is right proposes more, one that never is stops."""
    state = row([1, 2, 3, 9, 1, 2])
    drafts = Drafters([NgramDrafter()], 8).start(state)
    first = len(line(drafts, 8, 0.2))
    for i in range(60):
        for token in [[3, 9, 1, 2][i % 4]] if is_right else [100 + i, 1, 2]:  # 1, 2 is never followed by 3 again
            state.append(token)
            line(drafts, 8, 0.2)
    assert first == 1 and (len(line(drafts, 8, 0.2)) > 4 if is_right else line(drafts, 8, 0.2) == [])


def test_a_proposal_is_judged_once_per_place() -> None:
    acceptance = Acceptance()
    state = row([1, 2, 3, 4, 5, 1, 2])
    drafts = RowDrafts(state, [NgramDrafter()], acceptance)
    assert line(drafts, 4) == [3, 4, 5, 1]
    for token in (3, 4, 9):
        state.append(token)
        line(drafts, 4)
    shares = {place: acceptance._shares["ngram", 2, place] for place in range(3)}
    assert [(share.accepted, share.judged) for share in shares.values()] == [(1, 1), (1, 1), (0, 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fast", "give auto, off or a JSON object"),
        ("[1]", "give auto, off or a JSON object"),
        ('{"method": "magic"}', "'magic' is unknown: choose one of auto, ngram, suffix, lookahead, draft_model"),
        ('{"tokens": 4}', "has no 'tokens': give method, num_speculative_tokens"),
        ('{"method": "eagle"}', "method=eagle needs a model: give the name or folder of one"),
        ('{"method": "ngram", "model": "x"}', "method=ngram takes no model"),
        ('{"method": "draft_model", "model": 3}', "model=3 must be a name"),
        ('{"method": "self", "layers": "all"}', "layers='all' must be a list of layers' numbers"),
        ('{"model": "x", "layers": [1]}', "layers are for method=self, not draft_model"),
        ('{"method": "self", "verification": "rejection"}', "verification is for method=draft_model, not self"),
        ('{"model": "x", "verification": "some"}', "'some' is unknown: choose one of exact, rejection"),
        ('{"model": "x", "use_heterogeneous_vocab": 1}', "use_heterogeneous_vocab=1 must be true or false"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens=0 is out of range: it must be 1 to 32"),
        ('{"tree": 1}', "tree=1 is not valid: give true or false"),
        ('{"prompt_lookup_min": true}', "prompt_lookup_min=True is out of range: it must be 1 to 16"),
        ('{"disable_by_batch_size": 0}', "disable_by_batch_size=0 is out of range"),
        ('{"draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size=2 is not supported: a drafting model is not"),
        ('{"draft_tensor_parallel_size": true}', "draft_tensor_parallel_size=True is not supported"),
        ('{"acceptance_method": "typical_acceptance_sampler"}', "would no longer have the model's distribution"),
        ('{"model": "x", "quantization": "fp8"}', "quantization='fp8' is not supported: a drafting model is stored"),
        ('{"method": "ngram", "model": "llama"}', "method=ngram takes no model"),
        ('{"prompt_lookup_min": 9, "prompt_lookup_max": 4}', "prompt_lookup_min=9 is over prompt_lookup_max=4"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(words)):
        parse_speculation(text)


def test_what_is_taken() -> None:
    assert parse_speculation("off") is None and make_drafters(None) is None
    assert parse_speculation("auto") == parse_speculation("{}") == SpeculativeConfig()
    found = parse_speculation('{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5}')
    assert found == SpeculativeConfig("ngram", 4, 2, 5)
    assert parse_speculation('{"tree": true}') == SpeculativeConfig(tree=True)


@pytest.mark.parametrize("method", MODEL_METHODS)
def test_texts_draft_beside_a_model(method: str) -> None:
    drafters = make_drafters(SpeculativeConfig(method, prompt_lookup_min=3))
    assert drafters is not None
    assert [drafter.name for drafter in drafters.drafters] == ["prediction", "grammar", "ngram", "suffix"]
    assert line(drafters.start(row([1, 2, 3, 9, 1, 2, 3])), 4) == [9, 1, 2, 3]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ('{"method": "deepseek_mtp", "num_speculative_tokens": 1}', SpeculativeConfig("mtp", 1)),
        ('{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}', SpeculativeConfig("mtp", 2)),
        (
            '{"model": "[ngram]", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 1}',
            SpeculativeConfig("ngram", 5, 1, 4),
        ),
        ('{"method": "[ngram]", "prompt_lookup_max": 1}', SpeculativeConfig("ngram", 8, 1, 1)),
        (
            '{"method": "eagle3", "model": "x", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1, '
            '"max_model_len": 2048, "revision": null, "quantization": null, "disable_padded_drafter_batch": false}',
            SpeculativeConfig("eagle3", 3, model="x"),
        ),
        (
            '{"method": "suffix", "suffix_decoding_max_tree_depth": 24, "suffix_decoding_max_cached_requests": 1000, '
            '"suffix_decoding_max_spec_factor": 1.0, "suffix_decoding_min_token_prob": 0.1}',
            SpeculativeConfig("suffix", suffix_decoding_max_cached_requests=1000),
        ),
        ('{"method": "ngram", "disable_by_batch_size": 4}', SpeculativeConfig("ngram", disable_by_batch_size=4)),
    ],
)
def test_vllm_s_json_as_users_have_it(given: str, wanted: SpeculativeConfig) -> None:
    assert parse_speculation(given) == wanted


@pytest.mark.parametrize("given", ["off", "none", "None", "null", "false", "False", None, False])
def test_ways_to_say_off(given: Any) -> None:
    config = EngineConfig.from_options(speculative_config=given)
    assert parse_speculation(config.speculative_config) is None
    if isinstance(given, str):
        assert parse_speculation(given) is None  # as a flag, or in a config file
    assert parse_speculation(port_options({"speculative_config": given})["speculative_config"]) is None


def test_a_match_of_one_token_if_it_is_asked_for() -> None:
    drafts = Drafters([NgramDrafter(1)], 8).start(row([1, 2, 3, 9, 2]))
    assert line(drafts, 3) == [3, 9, 2]
    state = row([5], [6])
    drafts = Drafters([NgramDrafter(1)], 8).start(state)
    assert line(drafts) == []
    for token in (7, 5):
        state.append(token)
    assert line(drafts, 2) == [6, 7]
    assert line(Drafters([NgramDrafter()], 8).start(row([1, 2, 3, 9, 2]))) == []
    pairs = [1, 2, 3, 8, 9, 1, 2]  # the longest match comes first, unless one token is all that is compared
    assert line(Drafters([NgramDrafter(1)], 8).start(row([*pairs, 4, 2])), 1) == [4]
    assert line(Drafters([NgramDrafter(1)], 8).start(row(pairs)), 1) == [3]
    assert line(Drafters([NgramDrafter(1, 1)], 8).start(row(pairs)), 1) == [3]


@pytest.mark.parametrize("most", [0, 1, 5])
def test_as_many_earlier_answers_as_asked_for(most: int) -> None:
    answers = EarlierAnswers(max_answers=most)
    for i in range(40):
        answers.add((f"t{i % 3}", "s"), range(100 * i, 100 * i + 5))
        assert sum(index.tokens.count(END) for index in answers._texts.values()) <= most
    latest = answers.of(("t0", "s"))
    assert (latest is not None and latest.find([3900, 3901]) is not None) is (most > 0)


def test_a_prediction_is_followed_and_found_again() -> None:
    predicted = (10, 11, 12, 13, 14, 15, 16, 17, 18)
    state = row([1, 2], prediction=predicted)
    drafts = Drafters([PredictionDrafter()], 8).start(state)
    assert line(drafts, 3) == [10, 11, 12]
    for token in (10, 11, 99):  # instead of 12
        state.append(token)
    assert line(drafts, 3) == [13, 14, 15]
    for token in (98, 97, 16, 17):  # and a gap
        state.append(token)
    assert line(drafts, 3) == [18]
    state.append(18)
    assert line(drafts) == []
    assert line(Drafters([PredictionDrafter()], 8).start(row([1, 2]))) == []


def test_a_resumed_answer_goes_on_in_its_prediction() -> None:
    state = row([1, 2], [10, 11], prediction=(10, 11, 12, 13))
    assert line(Drafters([PredictionDrafter()], 8).start(state)) == [12, 13]
