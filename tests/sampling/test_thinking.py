"""Reasoning comes first and is free; its budget ends it; what must match begins right behind its end marker."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.plan import Draft
from penstock.errors import InvalidRequest
from penstock.sampling import RowState, Sampler
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.sampling.grammar.lexicon import Lexicon
from penstock.sampling.grammar.reasoning_guide import ReasoningGuide
from penstock.types import ReasoningBlock, Request, SamplingParams, StructuredOutputsParams

EOS, BEGIN, END = 256, 257, 258
SPELLED = [
    *(bytes([byte]) for byte in range(256)),
    b"<eos>",
    b"<think>",
    b"</think>",
    b"nk>",
    b'>{"',
    b">\n",
    b"</",
    b"<t",
]
POINT = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {"x": {"type": "integer", "maximum": 99}},
        "required": ["x"],
        "additionalProperties": False,
    }
)
OPEN, SHUT = ReasoningBlock("<think>", "</think>", is_open=True), ReasoningBlock("<think>", "</think>")


def make_grammars(special: bool = True) -> GrammarCompiler:
    """Markers are tokens of their own, or only bytes spell them."""
    spelled = SPELLED if special else [*SPELLED[:257], b"?", b"!", *SPELLED[259:]]
    named = {EOS: b"<eos>"} | ({BEGIN: b"<think>", END: b"</think>"} if special else {})
    lexicon = Lexicon(spelled, named, lambda text: list(text.encode()))
    return GrammarCompiler(lambda: lexicon)


SPECIAL, PLAIN = make_grammars(), make_grammars(special=False)


def make_row(
    grammars: GrammarCompiler,
    block: ReasoningBlock | None,
    tokens: list[int] | None = None,
    seed: int = 0,
    **sampling: Any,
) -> RowState:
    params = SamplingParams(**{"max_tokens": 100, "temperature": 1.0, **sampling})
    request = Request(
        id="r",
        tokens=(1,),
        sampling=params,
        seed=seed,
        eos_token_ids=(EOS,),
        max_tokens=params.max_tokens or 100,
        reasoning=block,
    )
    return RowState(request, 0, [1, *(tokens or [])], 1, grammars)


def write(row: RowState, likes: dict[int, float] | None = None, through: str = "edit") -> list[int]:
    """An answer by a model that likes some tokens and is otherwise random; also as a device would be told by masks."""
    sampler, tokens = Sampler(), list[int]()
    while len(tokens) < row.request.max_tokens and not row.is_finished:
        values = np.random.default_rng([row.request.seed, len(row.tokens)]).normal(size=len(SPELLED)).astype(np.float32)
        for token, bias in (likes or {}).items():
            values[token] += bias
        if through == "words" and row.failure is None and (row.guide is None or row.guide.free):
            words = row.words(row.num_generated, len(SPELLED))
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(SPELLED)]
            expected = row.edit(values) > -np.inf
            assert (allowed.astype(bool) == expected).all()
        chosen = sampler.sample(torch.from_numpy(values)[None], [row])[0]
        assert chosen.error is None, chosen.error
        tokens.append(chosen.token)
        row.append(chosen.token)
        if chosen.token == EOS:
            break
    return tokens


def spell(grammars: GrammarCompiler, tokens: list[int]) -> str:
    return b"".join(grammars.lexicon.spell(token) for token in tokens).decode(errors="replace")


@pytest.mark.parametrize("grammars", [SPECIAL, PLAIN], ids=["special", "plain"])
@pytest.mark.parametrize("max_tokens", [16, 40, 100, 300])
def test_it_thinks_and_then_matches(grammars: GrammarCompiler, max_tokens: int) -> None:
    """The block is open: the answer behind it is whole whatever the budget, though the model would never close it."""
    for seed in range(4):
        row = make_row(grammars, OPEN, structured_outputs=POINT, max_tokens=max_tokens, seed=seed)
        text = spell(grammars, write(row, {EOS: 3.0}, "words"))
        thought, end, answer = text.partition("</think>")
        assert end and set(json.loads(answer)) == {"x"}, text
        assert "<eos>" not in thought and (len(thought) > 10) == (max_tokens > 60)


@pytest.mark.parametrize("grammars", [SPECIAL, PLAIN], ids=["special", "plain"])
def test_the_model_may_open_the_block(grammars: GrammarCompiler) -> None:
    opening = (
        {BEGIN: 20.0}
        if grammars is SPECIAL
        else {ord("<"): 9.0, ord("t"): 9.0, 263: 9.0, ord("h"): 8.0, ord("i"): 8.0, 259: 9.0}
    )
    row = make_row(grammars, SHUT, structured_outputs=POINT, max_tokens=200)
    text = spell(grammars, write(row, opening, "words"))
    found = re.fullmatch(r"<think>.*</think>(.*)", text, re.DOTALL)
    assert found and set(json.loads(found[1])) == {"x"}, text
    row = make_row(grammars, SHUT, structured_outputs=POINT, max_tokens=200)
    assert set(json.loads(spell(grammars, write(row, {ord("{"): 9.0}, "words")))) == {"x"}


def test_without_a_block_or_room_the_answer_matches_from_its_first_token() -> None:
    for block, max_tokens in ((None, 200), (SHUT, 20)):
        row = make_row(SPECIAL, block, structured_outputs=POINT, max_tokens=max_tokens)
        assert set(json.loads(spell(SPECIAL, write(row, {BEGIN: 20.0})))) == {"x"}


@pytest.mark.parametrize("grammars", [SPECIAL, PLAIN], ids=["special", "plain"])
@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("block", [OPEN, SHUT], ids=["open", "shut"])
def test_a_budget_ends_reasoning(grammars: GrammarCompiler, budget: int, block: ReasoningBlock) -> None:
    begin = grammars.marker("<think>").write() if block is SHUT else ()
    row = make_row(grammars, block, list(begin), thinking_token_budget=budget, max_tokens=60)
    tokens = write(row, {EOS: -50.0, **dict.fromkeys(grammars.marker("</think>").write(), -50.0)}, "words")
    closing = list(grammars.marker("</think>").write("\n"))
    assert tokens[budget : budget + len(closing)] == closing
    assert not any(token in tokens[:budget] for token in closing[1:])
    assert len(tokens) > budget + len(closing) + 5 and row.guide is not None and row.guide.forced is None


def test_a_budget_holds_against_other_masks() -> None:
    row = make_row(
        SPECIAL,
        OPEN,
        thinking_token_budget=2,
        allowed_token_ids=[65, 66],
        min_tokens=8,
        max_tokens=10,
        logit_bias={END: -100.0},
    )
    assert spell(SPECIAL, write(row)[2:4]) == "\n</think>"


def test_reasoning_that_ends_by_itself_is_left_alone() -> None:
    row = make_row(SPECIAL, OPEN, [65, END], thinking_token_budget=3, max_tokens=30)
    assert END not in write(row, {END: -9.0, EOS: -9.0})


def test_where_an_answer_is_resumed_it_goes_on_the_same_way() -> None:
    """As after an engine's death, and after a draft's verification has gone ahead and back."""
    for grammars, block in ((SPECIAL, OPEN), (PLAIN, OPEN), (SPECIAL, SHUT)):
        for asked in (None, POINT):
            values: dict[str, Any] = {"structured_outputs": asked, "thinking_token_budget": 9, "max_tokens": 70}
            likes = {BEGIN: 4.0, EOS: -50.0}
            whole = write(make_row(grammars, block, **values), likes)
            for cut in range(0, len(whole), 7):
                row = make_row(grammars, block, whole[:cut], **values)
                for token in whole[cut : cut + 12]:
                    row.append(token)
                row.truncate(1 + cut)
                assert whole[:cut] + write(row, likes)[: len(whole) - cut] == whole


def test_drafts_are_verified_across_the_end_marker() -> None:
    values: dict[str, Any] = {"structured_outputs": POINT, "thinking_token_budget": 3, "max_tokens": 70}
    whole = write(make_row(SPECIAL, OPEN, **values))
    row = make_row(SPECIAL, OPEN, **values)
    logits = [
        np.random.default_rng([0, 1 + at]).normal(size=len(SPELLED)).astype(np.float32) for at in range(len(whole))
    ]
    draft = tuple(Draft(token, at - 1) for at, token in enumerate(whole[:-1]))
    sampled = Sampler().verify(np.stack(logits), row, draft)
    assert [one.token for one in sampled] == whole and row.num_generated == 0


def test_masks_wait_for_tokens_only_where_a_budget_may_end() -> None:
    """Rows of a GPU whose masks are known beforehand do not wait for the step before."""
    row = make_row(SPECIAL, OPEN, [65] * 4, thinking_token_budget=10, max_tokens=60)
    assert [row.is_mask_late(count) for count in (4, 5, 9, 10)] == [False, False, False, True]
    row = make_row(SPECIAL, OPEN, [65] * 4 + [END], thinking_token_budget=10, max_tokens=60)
    assert not row.is_mask_late(50) and row.stage(50) == 0
    assert make_row(SPECIAL, OPEN, thinking_token_budget=0).is_mask_late(0)


def test_a_token_that_ends_reasoning_and_begins_the_answer_is_ruled_out() -> None:
    row = make_row(PLAIN, OPEN, [*b"</think"], structured_outputs=POINT)
    assert isinstance(row.guide, ReasoningGuide)
    edited = row.edit(np.zeros(len(SPELLED), dtype=np.float32))
    assert edited[ord(">")] == 0 and edited[260] == edited[261] == -np.inf
    row = make_row(PLAIN, OPEN, [*b"</think"], thinking_token_budget=50)
    assert row.edit(np.zeros(len(SPELLED), dtype=np.float32))[261] == 0
    row.append(261)
    assert not row.is_mask_late(60)


def test_what_cannot_be_spelt_is_refused() -> None:
    lexicon = Lexicon([b"a", b"b"], {}, lambda text: [])
    row = make_row(GrammarCompiler(lambda: lexicon), OPEN, thinking_token_budget=3)
    assert row.failure is not None and "cannot spell" in row.failure
    with pytest.raises(InvalidRequest, match="thinking_token_budget=-2"):
        SamplingParams(thinking_token_budget=-2)
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
