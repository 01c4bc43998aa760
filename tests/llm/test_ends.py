"""How an answer ends, and what it may consist of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.types import CompletionOutput
from tests.llm import tiny

START = "the cat"


def one(llm: LLM, prompt: Any = START, **values: Any) -> CompletionOutput:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **values})
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def spelled(tokens: list[int]) -> list[str]:
    """The answer's text after each token."""
    return [tiny.tokenizer().decode(tokens[:count]) for count in range(1, len(tokens) + 1)]


@pytest.fixture
def free(text_llm: LLM) -> CompletionOutput:
    """The answer that nothing ends but its length; its characters are whole."""
    answer = again(text_llm)
    assert len(set(answer.text)) > 6, "the answer is dull"
    return answer


def ascii_ids() -> list[int]:
    """Tokens that spell whole characters, most of them more than one."""
    return [
        id
        for token, id in tiny.tokenizer().get_vocab().items()
        if token.isascii() and token.isalpha() and len(token) > 1 or token.startswith("Ġ")
    ]


def again(llm: LLM, **values: Any) -> CompletionOutput:
    return one(llm, START, allowed_token_ids=ascii_ids(), **values)


def test_length(text_llm: LLM, free: CompletionOutput) -> None:
    assert free.finish_reason == "length" and free.stop_reason is None and len(free.token_ids) == 24
    short = again(text_llm, max_tokens=7)
    assert (short.token_ids, short.finish_reason) == (free.token_ids[:7], "length")


def test_max_tokens_none_fills_the_context(config_folder: str) -> None:
    with tiny.dummy(config_folder, max_model_len=50) as model:
        assert [len(one(model, [1] * count, max_tokens=None).token_ids) for count in (1, 20, 49)] == [49, 30, 1]
    with tiny.dummy(config_folder, kv_cache_tokens=32) as model:
        assert len(one(model, [1] * 10, max_tokens=None).token_ids) == 22


def test_stop_string_across_tokens(text_llm: LLM, free: CompletionOutput) -> None:
    """Every run of 1 to 5 characters of the free answer, wherever tokens begin and end, cuts it at its first place."""
    ends = spelled(free.token_ids)
    stops = {free.text[at : at + size] for size in (1, 2, 3, 5) for at in range(0, len(free.text) - size, 3)}
    assert any(len(text) > 1 and not any(text in part for part in pieces(ends)) for text in stops), "none spans tokens"
    cases = [(stop, include) for stop in sorted(stops) for include in (False, True)]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=24,
            ignore_eos=True,
            allowed_token_ids=ascii_ids(),
            stop=[stop, "\x00never"],
            include_stop_str_in_output=include,
        )
        for stop, include in cases
    ]
    for (stop, include), output in zip(cases, text_llm.generate([START] * len(cases), params, use_tqdm=False)):
        answer, at = output.outputs[0], free.text.index(stop)
        assert answer.text == free.text[: at + len(stop) * include]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        needed = next(i for i, text in enumerate(ends) if stop in text) + 1
        assert answer.token_ids == free.token_ids[:needed]


def pieces(ends: list[str]) -> list[str]:
    return [text[len(before) :] for before, text in zip(["", *ends], ends)]


def test_stop_strings_end_each_sibling_by_itself(text_llm: LLM) -> None:
    params = SamplingParams(seed=5, n=6, max_tokens=20, ignore_eos=True, allowed_token_ids=ascii_ids())
    free = [one.text for one in text_llm.generate("the", params, use_tqdm=False)[0].outputs]
    stop = next(text for at in range(20) if 2 <= sum((text := free[3][at : at + 3]) in other for other in free) <= 4)
    cut = text_llm.generate("the", params.clone(stop=stop), use_tqdm=False)[0].outputs
    for whole, part in zip(free, cut):
        assert part.text == whole.split(stop)[0]
        assert part.finish_reason == ("stop" if stop in whole else "length")


def test_min_tokens_passes_stop_strings_over(text_llm: LLM, free: CompletionOutput) -> None:
    stop = free.text[1:3]
    ends = spelled(free.token_ids)
    assert len(again(text_llm, stop=stop).token_ids) < 10
    answer = again(text_llm, stop=stop, min_tokens=10)
    rest = free.text[len(ends[9]) :]
    if stop in rest:
        assert answer.text == free.text[: len(ends[9]) + rest.index(stop)]
    else:
        assert answer.text == free.text and answer.finish_reason == "length"
    assert len(answer.token_ids) > 10


def test_stop_token_ids(text_llm: LLM, free: CompletionOutput) -> None:
    """The token stays in token_ids; its text is shown only on request."""
    at = next(i for i in range(6, 24) if free.token_ids[i] not in free.token_ids[:i])
    token, ends = free.token_ids[at], ["", *spelled(free.token_ids)]
    for include, text in ((False, ends[at]), (True, ends[at + 1])):
        answer = again(text_llm, stop_token_ids=[299, token], include_stop_str_in_output=include)
        assert (answer.token_ids, answer.text) == (free.token_ids[: at + 1], text)
        assert (answer.finish_reason, answer.stop_reason) == ("stop", token)
    assert (
        "".join(
            delta.text
            for delta in text_llm.stream(
                START,
                SamplingParams(temperature=0, max_tokens=24, allowed_token_ids=ascii_ids(), stop_token_ids=[token]),
            )
        )
        == ends[at]
    )


@pytest.mark.parametrize("as_list", [False, True])
def test_end_of_sequence(tmp_path: Path, config_folder: str, as_list: bool) -> None:
    with tiny.dummy(config_folder) as model:
        free = one(model, [1, 2, 3]).token_ids
    at = next(i for i in range(3, 24) if free[i] not in free[:i])
    folder = Path(tiny.write_config(tmp_path / "model"))
    end = [255, free[at]] if as_list else free[at]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    with tiny.dummy(str(folder)) as model:
        answer = one(model, [1, 2, 3], ignore_eos=False)
        assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == (free[: at + 1], "stop", None)
        assert one(model, [1, 2, 3]).token_ids == free
        for least in (at, at + 1, at + 4):
            answer = one(model, [1, 2, 3], ignore_eos=False, min_tokens=least)
            assert len(answer.token_ids) >= least and free[at] not in answer.token_ids[:least]
            assert answer.token_ids[:at] == free[:at] and (answer.token_ids[at] == free[at]) == (least <= at)


def test_end_token_of_the_tokenizer_is_not_shown(text_llm: LLM) -> None:
    end = tiny.tokenizer().token_to_id(tiny.EOS)
    for skip in (True, False):
        answer = one(text_llm, ignore_eos=False, logit_bias={end: 100}, skip_special_tokens=skip)
        assert (answer.token_ids, answer.text, answer.finish_reason) == ([end], "", "stop")
        answer = one(text_llm, allowed_token_ids=[end], max_tokens=3, skip_special_tokens=skip)
        assert (answer.text, answer.finish_reason) == ("" if skip else tiny.EOS * 3, "length")


def test_only_allowed_tokens(text_llm: LLM) -> None:
    answer = one(text_llm, temperature=1.5, seed=1, max_tokens=40, allowed_token_ids=[70, 80, 90])
    assert set(answer.token_ids) == {70, 80, 90}


def test_logit_bias(text_llm: LLM) -> None:
    free = one(text_llm)
    without = one(text_llm, logit_bias={free.token_ids[2]: -100})
    assert without.token_ids[:2] == free.token_ids[:2] and free.token_ids[2] not in without.token_ids
    assert set(one(text_llm, logit_bias={77: 100}).token_ids) == {77}


def test_bad_words(text_llm: LLM, free: CompletionOutput) -> None:
    """A word of two tokens is kept out; each of its tokens alone is not."""
    encode = tiny.tokenizer().encode
    pair = next(
        text
        for first, second in zip(free.token_ids, free.token_ids[1:])
        if encode(text := tiny.tokenizer().decode([first, second])).ids == [first, second]
    )
    answer = again(text_llm, bad_words=[pair])
    first, second = encode(pair).ids
    assert (first, second) not in zip(answer.token_ids, answer.token_ids[1:])
    at = list(zip(free.token_ids, free.token_ids[1:])).index((first, second))
    assert answer.token_ids[: at + 1] == free.token_ids[: at + 1], "the first half is allowed"


def test_penalties_change_the_answer(text_llm: LLM) -> None:
    free = one(text_llm, max_tokens=40)
    for values in (dict(repetition_penalty=3.0), dict(presence_penalty=2.0), dict(frequency_penalty=2.0)):
        answer = one(text_llm, max_tokens=40, **values)
        assert len(set(answer.token_ids)) > len(set(free.token_ids)), values


def test_filters_narrow_the_choice(llm: LLM) -> None:
    """Whatever leaves one token is greedy."""
    greedy = one(llm, [1, 2, 3]).token_ids
    for values in (dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0), dict(temperature=1e-6)):
        assert one(llm, [1, 2, 3], **{"temperature": 1.0, "seed": 2, **values}).token_ids == greedy, values
    typical = one(llm, [1, 2, 3], temperature=1.0, seed=2, typical_p=0.2).token_ids
    assert typical != one(llm, [1, 2, 3], temperature=1.0, seed=2).token_ids


def test_truncated_prompt_keeps_its_end(llm: LLM) -> None:
    long = [i % 250 for i in range(500)]
    params = SamplingParams(temperature=0, truncate_prompt_tokens=20, max_tokens=8)
    output = llm.generate(long, params, use_tqdm=False)[0]
    assert output.prompt_token_ids == long[-20:]
    assert output.outputs[0].token_ids == one(llm, long[-20:], max_tokens=8).token_ids
    short = llm.generate([1, 2], SamplingParams(truncate_prompt_tokens=20, max_tokens=1), use_tqdm=False)[0]
    assert short.prompt_token_ids == [1, 2]


def test_truncated_text(text_llm: LLM) -> None:
    text = "the cat sat on the mat " * 2000
    output = text_llm.generate(text, SamplingParams(truncate_prompt_tokens=9, max_tokens=1), use_tqdm=False)[0]
    assert output.prompt_token_ids == tiny.tokenizer().encode(text).ids[-9:] and output.prompt == text
