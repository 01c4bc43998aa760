"""TGI's API: its parameters in the core's words, and on a running server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from penstock.server.http.errors import make_body_error
from penstock.server.tgi.routes import TgiBody, TgiEitherBody, TgiParameters, TgiStreamBody, finish_reason
from tests.server.running import RunningServer

PROMPT = "The capital of France is"


def parameters(**values: Any) -> TgiParameters:
    return TgiParameters.model_validate(values)


def test_greedy_unless_sampling_is_asked_for() -> None:
    assert parameters().to_sampling(50).temperature == 0.0
    assert parameters(do_sample=True).to_sampling(50).temperature == 1.0
    for asked in ({"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}, {"typical_p": 0.9}):
        assert parameters(**asked).is_sampled
    assert not parameters(temperature=1.0, top_p=1.0, repetition_penalty=1.2).is_sampled


def test_parameters_under_the_cores_names() -> None:
    params = parameters(
        do_sample=True,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        typical_p=0.8,
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        seed=7,
        stop=["a"],
        truncate=9,
        best_of=3,
        top_n_tokens=2,
        max_new_tokens=12,
        decoder_input_details=True,
        grammar={"type": "regex", "value": "[0-9]+"},
    ).to_sampling(50)
    assert (params.temperature, params.top_k, params.top_p, params.typical_p) == (0.7, 5, 0.9, 0.8)
    assert (params.repetition_penalty, params.frequency_penalty, params.seed) == (1.2, 0.1, 7)
    assert (params.stop, params.truncate_prompt_tokens, params.n, params.logprobs) == (("a",), 9, 3, 2)
    assert (params.max_tokens, params.prompt_logprobs, params.include_stop_str_in_output) == (12, 0, True)
    assert params.structured_outputs and params.structured_outputs.regex == "[0-9]+"


@pytest.mark.parametrize("room, meant", [(5, 5), (1000, 100)])
def test_answers_without_a_limit_end_where_there_is_no_room(room: int, meant: int) -> None:
    assert parameters().to_sampling(room).max_tokens == meant


@pytest.mark.parametrize(
    "kind, body, word",
    [
        (TgiBody, {"inputs": "x", "parameters": {"watermark": True}}, "watermark is not supported"),
        (TgiBody, {"inputs": "x", "parameters": {"best_of": 2}}, "do_sample"),
        (TgiBody, {"inputs": "x", "parameters": {"temprature": 1}}, "'parameters.temprature'"),
        (TgiBody, {"parameters": {}}, "'inputs'"),
        (TgiStreamBody, {"inputs": "x", "parameters": {"decoder_input_details": True}}, "cannot be streamed"),
        (
            TgiEitherBody,
            {"inputs": "x", "stream": True, "parameters": {"best_of": 2, "do_sample": True}},
            "cannot be streamed",
        ),
    ],
)
def test_refusals_name_the_parameter(kind: Any, body: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert word in make_body_error(caught.value).message


def test_why_an_answer_ended() -> None:
    assert [finish_reason("length", None), finish_reason("stop", None), finish_reason("stop", ".")] == [
        "length",
        "eos_token",
        "stop_sequence",
    ]


def post(server: RunningServer, path: str, **parameters: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={"inputs": PROMPT, "parameters": parameters}, timeout=240)


def test_generate(server: RunningServer) -> None:
    assert post(server, "/generate", max_new_tokens=2).json() == {"generated_text": " Paris."}
    answer = post(
        server,
        "/generate",
        max_new_tokens=2,
        details=True,
        decoder_input_details=True,
        top_n_tokens=2,
        return_full_text=True,
    ).json()
    details = answer["details"]
    assert answer["generated_text"] == PROMPT + " Paris."
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 2, None)
    assert "".join(token["text"] for token in details["prefill"]) == PROMPT
    assert details["prefill"][0]["logprob"] is None and details["prefill"][1]["logprob"] < 0
    assert [token["text"] for token in details["tokens"]] == [" Paris", "."]
    assert [len(top) for top in details["top_tokens"]] == [2, 2]


def test_streamed(server: RunningServer) -> None:
    response = post(server, "/generate_stream", max_new_tokens=20, stop=["\n"])
    events = [json.loads(line.removeprefix("data:")) for line in response.text.splitlines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
    last = events[-1]
    assert "".join(event["token"]["text"] for event in events) == last["generated_text"] == " Paris.\n"
    assert last["details"] == {"finish_reason": "stop_sequence", "generated_tokens": 3, "seed": None, "input_length": 5}


def test_either(server: RunningServer) -> None:
    assert post(server, "/", max_new_tokens=2).json() == [{"generated_text": " Paris."}]
    streamed = httpx.post(
        server.url + "/", json={"inputs": PROMPT, "stream": True, "parameters": {"max_new_tokens": 2}}
    )
    assert streamed.text.startswith('data:{"index":1,')


def test_best_of(server: RunningServer) -> None:
    details = post(server, "/generate", max_new_tokens=4, best_of=3, do_sample=True, seed=1, details=True).json()[
        "details"
    ]
    scores = [sum(token["logprob"] for token in one["tokens"]) for one in (details, *details["best_of_sequences"])]
    assert details["seed"] == 1 and len(scores) == 3 and scores == sorted(scores, reverse=True)


def test_errors_are_tgis(server: RunningServer) -> None:
    for path in ("/generate", "/generate_stream", "/"):
        answer = post(server, path, top_p=3)
        assert answer.status_code == 422 and answer.json()["error_type"] == "validation"
        assert "top_p" in answer.json()["error"]
