"""DRY, XTC, mirostat and the like in whole answers: given way and gone on, begun in one engine and ended by another."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock import LLM, SamplingParams
from penstock.engine.messages import Add, Deltas
from penstock.errors import InvalidRequest
from penstock.text.prompt_encoder import Encoded
from penstock.types import Delta

DRY: dict[str, Any] = {"dry_multiplier": 1.0, "dry_allowed_length": 1}
KINDS: list[dict[str, Any]] = [
    {"mirostat": 1, "mirostat_tau": 3.0},
    {"mirostat": 2, "mirostat_tau": 3.0},
    {"mirostat": 2, **DRY},
    {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    DRY,
    {"dynatemp_range": 0.8, "top_n_sigma": 2.0},
    {"repetition_penalty": 1.5, "repeat_last_n": 7},
]


def _params(**sampling: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, **sampling)


def _answers(llm: LLM, preempted: bool) -> list[list[int]]:
    service = llm.service
    collectors = [service.submit(Encoded([5, 6, 7, 5, 6]), _params(**kind)) for kind in KINDS]
    step = 0
    while service.engine.has_work:
        running = service.engine.scheduler.roster.running
        if preempted and running and step % 4 == 3:
            service.engine.scheduler.roster.preempt(running[step % len(running)])
        service.step()
        step += 1
    for collector in collectors:
        service.abort(collector)
    return [list(collector.output().outputs[0].token_ids) for collector in collectors]


def test_a_row_that_gives_way_goes_on_as_it_would_have(text_llm: LLM) -> None:
    expected = _answers(text_llm, False)
    assert _answers(text_llm, True) == expected
    assert len({tuple(answer) for answer in expected}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_another_engine_goes_on(text_llm: LLM, kind: dict[str, Any]) -> None:
    """What an engine told before its death, as it goes over the wire, is enough for the next one: bit for bit."""
    engine, intake = text_llm.service.engine, text_llm.service.intake

    def run(add: Add, most: int) -> list[Delta]:
        add = msgspec.msgpack.decode(msgspec.msgpack.encode(add), type=Add)
        engine.add(add.request, add.outputs, add.mus)
        deltas: list[Delta] = []
        while engine.has_work and len(deltas) < most:
            deltas += engine.step()
        engine.abort(add.request.id)
        while engine.has_work:
            engine.step()
        return msgspec.msgpack.decode(msgspec.msgpack.encode(Deltas(deltas)), type=Deltas).deltas

    request = intake.request(Encoded([5, 6, 7, 5, 6]), _params(**kind))
    whole = [token for delta in run(Add(request), 99) for token in delta.tokens]
    for cut in (1, 11):
        told = run(Add(request), cut)
        said = [token for delta in told for token in delta.tokens]
        assert told[-1].mu is not None and said == whole[:cut]
        rest = run(Add(request, {0: said}, {0: told[-1].mu}), 99)
        assert said + [token for delta in rest for token in delta.tokens] == whole


def test_siblings_have_each_their_own_mu(text_llm: LLM) -> None:
    both = text_llm.generate([[5, 6, 7]], _params(mirostat=2, mirostat_tau=2.0, n=2), use_tqdm=False)[0].outputs
    first = text_llm.generate([[5, 6, 7]], _params(mirostat=2, mirostat_tau=2.0), use_tqdm=False)[0].outputs[0]
    assert both[0].token_ids == first.token_ids != both[1].token_ids


def test_dry_ends_a_loop(text_llm: LLM) -> None:
    """A model that repeats one word says others with DRY; a breaker in that word lets it go on."""
    biased = {"logit_bias": {40: 100.0}, "temperature": 0.0, "max_tokens": 8}
    assert text_llm.tokenizer is not None
    char = text_llm.tokenizer.token_text(40)
    strong = {"dry_multiplier": 1000.0, "dry_allowed_length": 2}

    def said(**sampling: Any) -> list[int]:
        params = SamplingParams(ignore_eos=True, **{**biased, **sampling})
        return list(text_llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)

    assert said() == [40] * 8
    assert said(**strong)[:3] == [40] * 3 and said(**strong)[3] != 40
    assert said(**strong, dry_sequence_breakers=[char]) == [40] * 8


def test_breakers_need_a_tokenizer(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="dry_sequence_breakers need a tokenizer"):
        llm.generate([[1, 2]], SamplingParams(**DRY), use_tqdm=False)
    assert llm.generate([[1, 2]], SamplingParams(**DRY, dry_sequence_breakers=()), use_tqdm=False)[0].finished
