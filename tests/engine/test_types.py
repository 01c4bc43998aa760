"""What a user may ask for: limits, normal forms, and what a request derives from them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.types import BeamSearchParams, Request, SamplingParams

OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("n", 0, "1 to 256"),
    ("n", 257, "1 to 256"),
    ("n", True, "1 to 256"),
    ("n", 1.0, "1 to 256"),
    ("best_of", 0, "n=1 to 256"),
    ("best_of", 257, "n=1 to 256"),
    ("temperature", -0.1, "0 or more"),
    ("temperature", float("nan"), "0 or more"),
    ("temperature", float("inf"), "0 or more"),
    ("temperature", "1", "0 or more"),
    ("top_k", -2, "0 or -1 (off) or 1 or more"),
    ("top_k", 1.5, "0 or -1 (off) or 1 or more"),
    ("top_p", 0, "over 0 and at most 1"),
    ("top_p", 1.01, "over 0 and at most 1"),
    ("min_p", -0.01, "0 to 1"),
    ("min_p", 1.01, "0 to 1"),
    ("typical_p", 0, "over 0 and at most 1"),
    ("typical_p", 2, "over 0 and at most 1"),
    ("repetition_penalty", 0, "over 0"),
    ("presence_penalty", 2.1, "-2 to 2"),
    ("frequency_penalty", -2.1, "-2 to 2"),
    ("seed", 2**64, "a 64-bit integer"),
    ("seed", -(2**63) - 1, "a 64-bit integer"),
    ("seed", 1.5, "a 64-bit integer"),
    ("max_tokens", 0, "1 or more, or None for as many as fit"),
    ("min_tokens", -1, "0 or more"),
    ("min_tokens", 17, "at most max_tokens=16"),
    ("logprobs", 65, "0 to 64, or None"),
    ("prompt_logprobs", -1, "0 to 64, or None"),
    ("truncate_prompt_tokens", 0, "1 or more, or None to refuse"),
    ("stop", "", "a non-empty string or a list of them"),
    ("stop", ["a", 3], "a non-empty string or a list of them"),
    ("stop", ["x"] * 65, "at most 64 strings"),
    ("bad_words", [""], "a non-empty string or a list of them"),
    ("stop_token_ids", [-1], "a list of token ids, each 0 or more"),
    ("stop_token_ids", ["a"], "a list of token ids, each 0 or more"),
    ("allowed_token_ids", [], "None or at least one token id"),
    ("logit_bias", {-1: 0.0}, "a map from token id to bias"),
    ("logit_bias", {3: 100.5}, "-100 to 100"),
    ("logit_bias", {3: float("nan")}, "-100 to 100"),
]


@pytest.mark.parametrize("name, value, limit", OUT_OF_RANGE)
def test_values_out_of_range_are_refused(name: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**{name: value})
    message = str(refusal.value)
    assert message.startswith(f"{name}=") and message.endswith(f" is out of range: it must be {limit}")
    assert "\n" not in message


@pytest.mark.parametrize(
    "options",
    [
        {"n": 256},
        {"n": 2, "best_of": 2},
        {"temperature": 0},
        {"top_k": -1},
        {"top_p": 1},
        {"min_p": 1},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"max_tokens": None, "min_tokens": 99},
        {"min_tokens": 16},
        {"logprobs": 0},
        {"prompt_logprobs": 64},
        {"logit_bias": {5: -100}},
        {"stop": ["x"] * 64},
    ],
)
def test_values_at_the_limits_are_taken(options: dict[str, Any]) -> None:
    SamplingParams(**options)


def test_lists_become_tuples_and_single_strings_too() -> None:
    params = SamplingParams(
        stop="end", bad_words=["a", "b"], stop_token_ids=[1, 2], allowed_token_ids=[3], logit_bias={4: 1}
    )
    assert (params.stop, params.bad_words, params.stop_token_ids) == (("end",), ("a", "b"), (1, 2))
    assert (params.allowed_token_ids, params.logit_bias) == ((3,), {4: 1.0})
    assert (SamplingParams().stop, SamplingParams().stop_token_ids) == ((), ())
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_best_of_must_hold_n_and_decides_how_many_run() -> None:
    with pytest.raises(InvalidRequest, match="best_of=2 is out of range: it must be n=3 to 256"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=2, best_of=5).num_siblings == 5
    assert SamplingParams(n=2).num_siblings == 2


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequest, match="stop strings need detokenize=True; use stop_token_ids"):
        SamplingParams(stop="x", detokenize=False)


def test_clone_checks_again() -> None:
    params = SamplingParams(temperature=0)
    assert params.greedy and not params.clone(temperature=0.5).greedy
    with pytest.raises(InvalidRequest):
        params.clone(top_p=3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"beam_width": 0}, "beam_width=0 is out of range: it must be 1 to 32"),
        ({"beam_width": 33}, "beam_width=33 is out of range: it must be 1 to 32"),
        ({"max_tokens": 0}, "max_tokens=0 is out of range: it must be 1 or more"),
        ({"length_penalty": float("inf")}, "length_penalty=inf is out of range: it must be -10 to 10"),
        ({"temperature": 0.5}, "temperature=0.5 is out of range: it must be 0: beams rank the raw distribution"),
    ],
)
def test_beam_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **options})
    assert str(refusal.value) == message


def test_what_ends_a_request() -> None:
    params = SamplingParams(stop_token_ids=[7])
    assert Request(id="r", tokens=(1,), sampling=params, eos_token_ids=(2,)).stop_token_ids == (2, 7)
    ignoring = params.clone(ignore_eos=True)
    assert Request(id="r", tokens=(1,), sampling=ignoring, eos_token_ids=(2,)).stop_token_ids == (7,)
    beam = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    assert Request(id="r", tokens=(1,), beam=beam, eos_token_ids=(2,)).stop_token_ids == ()


def test_beams_and_pooling_are_one_sequence() -> None:
    many = SamplingParams(n=4)
    assert Request(id="r", tokens=(1,), sampling=many).num_siblings == 4
    assert Request(id="r", tokens=(1,), sampling=many, pool=True).num_siblings == 1
    beam = BeamSearchParams(beam_width=2, max_tokens=3)
    assert Request(id="r", tokens=(1,), sampling=many, beam=beam).num_siblings == 1
